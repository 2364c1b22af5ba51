"""Agreement of the processes of a run before they use a device, by JAX's key-value store instead of collectives.

A collective between processes that were started differently hangs or dies without an explanation.  The store works as
soon as the processes have joined, whatever their devices, and in every thread.  All processes must call these functions
with the same names, and the calls of one name in the same order.
"""

import importlib.metadata
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import jax

# The client of the store, the number of this process before a device is used and the address of process 0 have no
# public name.  The other modules take `global_state` from here.
from jax._src.distributed import global_state

from shmap_tp.config.compose import to_dict
from shmap_tp.config.schema import Config
from shmap_tp.config.yaml_files import flat
from shmap_tp.errors import LostProcessError, ShmapTpError, UserError

PREFIX = "shmap_tp/agreement/"
T = TypeVar("T")
_calls: Counter[tuple[int, str]] = Counter()
"""How often each process has called with each name."""
READ_SECONDS = 5.0
"""How long process 0 waits, before it ends with an error, until the others have read that error."""
PER_HOST = {"run.dir", "run.compilation_cache", "data.dir", "data.cache", "data.name", "data.source"} | {
    "checkpoint.local_dir"
}
"""Configuration keys that may differ between processes: paths on a host, also those of data.sources.  The
contents of the data are compared.  Keys of `log` may differ, too: only process 0 logs."""


def on_process_0(name: str, action: Callable[[], T]) -> T:
    """What `action`, called in process 0 only, returns, a JSON value: in all processes, which wait for it.

    A ShmapTpError that it raises is raised in all.
    """
    return action() if global_state.client is None else _from_process_0(_key(name), action)


def divided(name: str, plan: Callable[[], list[Any]], work: Callable[[Any], Any]) -> list[Any]:
    """`work` of each item of `plan()`, which process 0 calls: item I is done by process I.  All get all results.

    Items and results are JSON values.  A ShmapTpError of any process is raised in all.
    """
    if global_state.client is None:
        return [work(item) for item in plan()]
    key = _key(name)
    items = _from_process_0(f"{key}/plan", plan)
    try:
        done = {"value": work(items[global_state.process_id])}
    except ShmapTpError as error:
        done = {"error": [error.exit_code, str(error)]}
    global_state.client.key_value_set(f"{key}/{global_state.process_id}", json.dumps(done))

    def results() -> list[Any]:
        found = [_value(_wait_for(f"{key}/{process}")) for process in range(global_state.num_processes)]
        base, _, number = key.rpartition("/")
        global_state.client.key_value_delete(f"{base}/{int(number) - 1}/")  # all processes have read it
        return found

    return _from_process_0(key, results)


def require_agreement(name: str, facts: dict[str, Any], seconds: int | None = None) -> None:
    """Raise UserError, the same in all processes, unless all call this with equal `facts`: JSON values by key.

    Process 0 compares them once all have called.  Raises LostProcessError if that takes longer than `seconds`; without
    a limit, an end of the wait needs `Peers`, which notices a process that is lost.
    """
    if global_state.client is None:
        return
    key = _key(name)
    global_state.client.key_value_set(f"{key}/{global_state.process_id}", json.dumps(facts))

    def compare() -> None:
        deadline, found = None if seconds is None else time.monotonic() + seconds, []
        for process in range(global_state.num_processes):
            try:
                found.append(json.loads(_wait_for(f"{key}/{process}", deadline)))
            except TimeoutError as error:
                raise LostProcessError(
                    f"process {process} joined, but did not report its {name} within {seconds} s "
                    f"(run.join_timeout_seconds); see its log, and start all processes again"
                ) from error
        if differences := _differences(found):
            more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
            raise UserError(
                f"the processes were started differently: {'; '.join(differences[:3])}{more};\n"
                f"start all of them with the same command, configuration, data and versions"
            )

    _from_process_0(key, compare)


def launch_facts(config: Config) -> dict[str, Any]:
    """What all processes must have in common before they use a device: configuration and versions, by name."""
    values = flat(to_dict(config))
    values = {key: values[key] for key in values if key not in PER_HOST and not key.startswith("log.")}
    values["data.sources"] = {name: source | {"dir": None} for name, source in values["data.sources"].items()}
    versions = {f"the version of {name}": importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    return values | versions | {"the source code of shmap_tp (sha256)": _source_hash()}


def data_facts(identity: dict[str, Any]) -> dict[str, str]:
    """What the data of all processes must have in common, by file; `identity` is that of `data_identity`."""
    found = {
        "/".join(filter(None, [source, f"{name}.bin"])): f"{part['tokens']} tokens of sha256 {part['sha256'][:12]}"
        for source, files in identity.get("sources", {"": identity}).items()
        for name, part in files.items()
        if isinstance(part, dict) and "tokens" in part
    }
    tokenizer = str(identity["tokenizer"]["sha256"])[:12]
    return found | {"the tokenizer (sha256)": tokenizer, "the id that ends documents": str(identity["isolated"])}


def _source_hash() -> str:
    """sha256 of this package's modules, in hexadecimal, 12 digits."""
    package, digest = Path(__file__).parents[1], sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _differences(facts: list[dict[str, Any]]) -> list[str]:
    """One clause for each key whose value is not the same in all `facts`, which are those of process 0, 1, ..."""
    found = []
    for key in dict.fromkeys(key for each in facts for key in each):
        processes: dict[str, list[int]] = {}
        for process, each in enumerate(facts):
            processes.setdefault(json.dumps(each.get(key)).strip('"'), []).append(process)
        if len(processes) > 1:
            values = (f"{value} on {_process_names(numbers)}" for value, numbers in processes.items())
            found.append(f"{key} is {', '.join(values)}")
    return found


def _process_names(numbers: list[int]) -> str:
    """Such as "processes 0, 2": at most three of them, and how many there are."""
    more = f", ... ({len(numbers)} in all)" if len(numbers) > 3 else ""
    return f"process{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers[:3]))}{more}"


def _key(name: str) -> str:
    """The key of this call, which no other call has: a name may be used again."""
    _calls[global_state.process_id, name] += 1
    return f"{PREFIX}{name}/{_calls[global_state.process_id, name]}"


def _from_process_0(key: str, action: Callable[[], Any]) -> Any:
    """`on_process_0`, by the verdict at `key`."""
    client = global_state.client
    if global_state.process_id:
        verdict = _wait_for(f"{key}/verdict")
        client.key_value_set(f"{key}/read/{global_state.process_id}", "")
        return _value(verdict)
    try:
        value = action()
    except ShmapTpError as error:
        client.key_value_set(f"{key}/verdict", json.dumps({"error": [error.exit_code, str(error)]}))
        with suppress(TimeoutError):
            deadline = time.monotonic() + READ_SECONDS
            for process in range(1, global_state.num_processes):
                _wait_for(f"{key}/read/{process}", deadline)
            time.sleep(1)  # the store ends with this process, and then JAX aborts those that have not ended yet
        raise
    client.key_value_set(f"{key}/verdict", json.dumps({"value": value}))
    return value


def _value(answer: str) -> Any:
    """The value in an answer; raises the error in one."""
    answer = json.loads(answer)
    if "error" in answer:
        code, message = answer["error"]
        raise LostProcessError(message) if code == LostProcessError.exit_code else UserError(message)
    return answer["value"]


def _wait_for(key: str, deadline: float | None = None) -> str:
    """The value of `key`, once a process has set it.  Raises TimeoutError at `deadline`, a time of time.monotonic().

    Waits in short calls, because no signal handler runs within one.
    """
    while deadline is None or time.monotonic() < deadline:
        try:
            return global_state.client.blocking_key_value_get(key, 500)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    raise TimeoutError(key)
