"""The timeline of a simulated schedule, and its plot."""

import pytest

from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.plan.hlo_parser import parse_hlo
from shmap_tp.plan.plot import PlannedMemory, plot_step
from shmap_tp.plan.schedule_simulator import SimulatedSchedule, simulate
from tests.helpers.hlo_text import (
    ALL_GATHER,
    LINK_MODEL,
    US,
    about,
    all_reduce,
    done,
    fusion,
    gather_start,
    loop,
    module_text,
)  # fmt: skip

SIZES = {DP: 4, MP: 4}
LAYERS = 8


def recorded() -> SimulatedSchedule:
    """8 layers, each with an all-gather over dp and an all-reduce over mp, then the update."""
    layer = "\n  ".join([gather_start("s"), fusion("f", ALL_GATHER / 2), done("s"), all_reduce("r", "f")])
    computations, entry = loop("layers", layer, limit=LAYERS)
    text = module_text(f"{entry}\n{fusion('u', US, scope='update/mul')}", computations)
    return simulate(parse_hlo(text), LINK_MODEL, record=True)


def test_a_schedule_has_a_timeline_only_on_request():
    assert simulate(parse_hlo(module_text(fusion("f", US))), LINK_MODEL).timeline is None
    (interval,) = simulate(parse_hlo(module_text(fusion("f", US))), LINK_MODEL, record=True).timeline
    assert (interval.kind, interval.label, interval.begin, interval.end) == ("compute", "mlp", 0.0, about(US))


def test_the_timeline_holds_two_iterations_of_a_loop_and_one_interval_for_the_others():
    schedule = recorded()
    kinds = [interval.kind for interval in schedule.timeline]
    assert kinds == 2 * ["links", "compute", "waiting", "links", "waiting"] + ["repeats", "compute"]
    layer = (schedule.seconds - US) / LAYERS
    first, second, repeats, update = (schedule.timeline[i] for i in (0, 5, 10, 11))
    assert second.begin - first.begin == about(layer)
    assert (repeats.label, repeats.begin, repeats.end) == (str(LAYERS - 2), about(2 * layer), about(LAYERS * layer))
    assert (update.label, update.end) == ("update", about(schedule.seconds))
    drawn = sum(one.end - one.begin for one in schedule.timeline if one.kind in ("compute", "waiting", "repeats"))
    assert drawn == about(schedule.seconds), "compute, waiting and repeated iterations fill the step"


@pytest.mark.parametrize("host", [0.0, 3e6])
def test_a_step_is_drawn_as_png(tmp_path, host):
    memory = PlannedMemory({"parameters": 1e6, "optimizer": 2e6, "gradients": 1e6, "activations": 4e6}, 16e6, host)
    plot_step(recorded(), memory, SIZES, "a step", tmp_path / "step.png")
    content = (tmp_path / "step.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000
