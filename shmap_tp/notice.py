"""A machine's own notice that it will be taken away: Google Cloud's metadata server, which every TPU VM can ask.

    instance/preempted           TRUE once a spot or preemptible machine is being stopped
    instance/maintenance-event   NONE, or what the host is about to do to the machine, up to a minute before it does

https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice, which gives the minute to those alone who
have asked before.  SIGTERM comes as well, but later, and not to every process that a user starts.
"""

import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from shmap_tp.metrics import say

SERVER = "metadata.google.internal"
QUIET = {"preempted": "FALSE", "maintenance-event": "NONE"}
"""What the keys hold while all is well."""


@contextmanager
def heeded(told: threading.Event, pause: float = 5.0) -> Iterator[None]:
    """Set `told` as soon as the machine is to be taken away.  A thread asks every `pause` seconds; it asks nobody where
    there is no TPU, unless GCE_METADATA_HOST names a server (Google's own libraries read it, too)."""
    server = os.environ.get("GCE_METADATA_HOST") or (SERVER if jax.devices()[0].platform == "tpu" else None)
    if server is None:
        yield
        return
    left = threading.Event()
    thread = threading.Thread(target=_watch, args=(server, told, left, pause), daemon=True, name="notice")
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


def _watch(server: str, told: threading.Event, left: threading.Event, pause: float) -> None:
    """A server that does not answer is asked again: it may be busy, and SIGTERM remains."""
    answered = True
    while not told.is_set():
        try:
            for key, quiet in QUIET.items():
                if (now := _ask(server, key)) != quiet:
                    print(f"this machine is about to be taken away ({key} is {now}): stopping", flush=True)
                    told.set()
                    return
            answered = True
        except (urllib.error.URLError, TimeoutError, OSError) as error:
            if answered:
                say(f"{server} does not say whether this machine is to be taken away ({error}); asking on")
            answered = False
        if left.wait(pause):
            return


def _ask(server: str, key: str) -> str:
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/{key}", headers={"Metadata-Flavor": "Google"}
    )
    with urllib.request.urlopen(request, timeout=2) as answer:
        return answer.read().decode().strip()
