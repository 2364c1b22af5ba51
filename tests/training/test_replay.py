"""Two computations from the same bits that differ name the device that computed wrongly, on every mesh."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from shmap_tp.data.batches import Batches
from shmap_tp.errors import HardwareError
from shmap_tp.layers import linear
from shmap_tp.parallel import fsdp
from shmap_tp.parallel.collectives import varying_axes
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.training import loop, step
from shmap_tp.training.integrity import fingerprint
from shmap_tp.training.replay import Replay, watched
from tests.helpers.run_fixtures import checkpoint_steps, flip_bit, tiny, values

FAULTS = {"gather": (fsdp, "all_gather"), "matmul": (linear, "_multiply")}
"""The functions whose result has a flipped bit."""
FIRST = {"gather": "reduce_scatter over mp in embedding", "matmul": "reduce_scatter over mp in blocks"}
"""The first collective that follows."""
DEVICES = [0, 3, 6]


def with_fault(function: Callable[..., Any], code: int, fault: SimpleNamespace) -> Callable[..., Any]:
    """`function`, and on the device of `fault.code`, 100 for each kind of fault plus its rank, a bit of the last
    element of its result is flipped."""

    def flipped(x: jax.Array) -> jax.Array:
        axes = get_abstract_mesh().axis_names
        if fault.code is None or varying_axes(x) != {*axes}:
            return x
        here = fault.code == code + lax.axis_index(axes)
        last = jnp.arange(x.size).reshape(x.shape) == x.size - 1
        bits = lax.bitcast_convert_type(x, jnp.uint32) ^ jnp.where(here & last, jnp.uint32(1 << 22), 0)
        return x + lax.stop_gradient(lax.bitcast_convert_type(bits, jnp.float32) - x)

    return lambda *arguments: jax.tree.map(flipped, function(*arguments))


@pytest.fixture
def program(tmp_path, monkeypatch) -> Callable[..., tuple[Any, Any, Any]]:
    """Settings -> (the replay of a run, whose computations have a fault where state.guard.taken says so, an initial
    state, tokens)."""
    fault = SimpleNamespace(code=None)

    def watched_with_fault(function: Callable[..., Any], *, state: Any, batch: Any) -> Any:
        fault.code = state.guard.taken
        return watched(function, state=eqx.tree_at(lambda s: s.guard.taken, state, jnp.int32(0)), batch=batch)

    monkeypatch.setattr(step, "watched", watched_with_fault)
    for number, (module, name) in enumerate(FAULTS.values(), start=1):
        monkeypatch.setattr(module, name, with_fault(getattr(module, name), 100 * number, fault))

    def build(*settings: str) -> tuple[Any, Any, Any]:
        config = tiny(tmp_path, *settings)
        functions = step.build_step_functions(config, make_mesh(config.mesh), jnp.float32)
        tokens = jax.random.randint(jax.random.key(0), functions.tokens.shape, 1, 64)
        return functions.replay, functions.init(), jax.device_put(tokens, functions.tokens.sharding)

    return build


def test_a_flipped_bit_names_the_device_and_the_array(program):
    """In a mode that reduces and scatters, with weights sharded over both axes: no array has a replica."""
    compute, state, tokens = program("mesh.dp=2", "mesh.mp=4", "mesh.zero=fsdp", "mesh.tensor_parallel=sequence")
    mesh = tokens.sharding.mesh

    def found(second: Any = state, rows: Any = tokens, code: int = 0) -> str:
        """The message of a replay whose second computation has another state, other rows or a fault."""
        states = iter([state, eqx.tree_at(lambda s: s.guard.taken, second, jnp.int32(code))])
        check = Replay(lambda _, *read: compute(next(states), *read), mesh).check
        with pytest.raises(HardwareError) as caught:
            check(state, (tokens,), lambda: (rows,), 7)
        message = str(caught.value).splitlines()
        assert message[1] == "resume from the newest checkpoint without that device: checkpoint.resume=must"
        return message[0].removeprefix("before step 7 two computations from the same bits differ, first on ")

    moment = next(name for name in compute(state, tokens).places if "nu/blocks/mlp/up" in name)
    for device in DEVICES:
        on = f"device {device} (process 0): "
        flipped = flip_bit(state, moment.removeprefix("state/"), device)
        assert found(flipped) == f"{on}{moment};"
        Replay(compute, mesh).check(flipped, (tokens,), lambda: (tokens,), 1)  # it was there before: no fault is seen
        weight = "params/blocks/mlp/up/weight"
        assert found(flip_bit(state, weight, device)).startswith(f"{on}state/{weight}; then gradients/")
        rows = flip_bit({"rows": tokens}, "rows", device)["rows"]
        assert found(rows=rows).startswith(f"{on}batch/targets")
        for number, kind in enumerate(FAULTS, start=1):
            message = found(code=100 * number + device)
            assert message.startswith(f"{on}operand of {FIRST[kind]}, float32["), (kind, message)
            assert message.endswith("; then gradients/embedding/weight and 9 more;"), (kind, message)


def test_the_iterations_of_a_backward_scan_are_in_the_order_in_which_they_run():
    mesh, rows = Mesh(jax.devices()[:2], "mp"), jnp.float32([[1, 2], [3, 4], [5, 6]])

    def function(rows: jax.Array) -> jax.Array:
        return lax.scan(lambda carry, row: (carry, lax.psum(row, "mp")), None, rows, reverse=True)[1]

    specs = {"in_specs": P(None, "mp"), "out_specs": P("mp")}
    by_device = jax.shard_map(lambda rows: watched(function, rows=rows), mesh=mesh, **specs)
    found = jax.jit(by_device)(rows)
    operands = {place: n for n, place in enumerate(found.places) if place.startswith("operand")}
    assert [place.rpartition(" ")[2] for place in operands] == ["2", "1", "0"]
    expected = [[int(fingerprint(rows[i, device : device + 1])) for i in (2, 1, 0)] for device in (0, 1)]
    assert found.table[:, [*operands.values()]].tolist() == expected


def test_a_run_stops_before_the_step_whose_replay_differs_and_is_the_run_without_replays_until_then(
    tmp_path, uninterrupted, monkeypatch
):
    steps: list[int] = []

    def training(self: Batches, number: int, read: Any = Batches.training) -> Any:
        steps.append(number)
        rows = read(self, number)
        return flip_bit({"rows": rows}, "rows", 5)["rows"] if steps.count(number) == 2 and number == 5 else rows

    monkeypatch.setattr(Batches, "training", training)
    with pytest.raises(HardwareError, match=r"before step 6 .* first on device 5 \(process 0\): batch/targets"):
        loop.train(tiny(tmp_path, "train.replay_every=3"))
    assert steps == [0, 1, 2, 2, 3, 4, 5, 5]
    assert values(tmp_path) == values(uninterrupted)[:5] and checkpoint_steps(tmp_path) == [2, 4]
