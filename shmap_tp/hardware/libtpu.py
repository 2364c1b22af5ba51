"""libtpu, the TPU compiler and driver, on a machine without a TPU.

`pip install '.[tpu]'` installs it anywhere, for the planner.  JAX then tries it as a backend, and libtpu prints several
lines about a machine that it does not know before it finds no TPU.
"""

import os

import jax  # noqa: F401 - it sets TPU_SKIP_MDS_QUERY where it finds no chip

ANY_TPU = {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
"""Environment variables that describe a machine which libtpu knows.  Any will do where there is no TPU."""


def describe_machine_without_tpu() -> None:
    """Let libtpu take this machine for one that it knows, if it has no TPU.  Must be called before JAX first uses a
    backend."""
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        for name, value in ANY_TPU.items():
            os.environ.setdefault(name, value)
