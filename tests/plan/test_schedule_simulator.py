"""Simulated schedules with loops and branches, and the scopes that time is attributed to."""

import pytest

from shmap_tp.plan.hlo_parser import parse_hlo
from shmap_tp.plan.schedule_simulator import source_scope
from tests.helpers.hlo_text import (
    ALL_GATHER,
    ALL_REDUCE,
    BYTES,
    US,
    X,
    about,
    all_reduce,
    fusion,
    gather_start,
    loop,
    run,
)  # fmt: skip

SCOPES = {
    "jit(step)/shard_map/while/body/closed_call/jvp(blocks)/while/body/closed_call/attention/dot_general": "attention",
    "jit(step)/shard_map/while/body/closed_call/transpose(jvp(blocks))/while/body/closed_call/mlp/dot_general": "mlp",
    "jit(step)/shard_map/while/body/transpose(jvp(blocks))/while/body/mlp/combine/gather": "rows from experts",
    "jit(step)/shard_map/while/body/closed_call/jvp(blocks)/while/body/add": "blocks, the rest",
    "jit(step)/shard_map/while/body/closed_call/jvp(head)/while/body/closed_call/cross_entropy/reduce_max": "loss",
    "jit(step)/shard_map/while/body/closed_call/transpose(jvp(embedding))/scatter-add": "embedding",
    "jit(step)/shard_map/while/body/closed_call/jvp(head)/while/body/closed_call/dot_general": "head",
    "jit(step)/shard_map/while/body/closed_call/transpose(jvp(head))/mul": "head",
    "jit(step)/shard_map/update/mul": "update",
    "jit(step)/shard_map/dp_gradient_reduction/psum": "update",
    "jit(step)/shard_map/while/body/dynamic_slice": "other",
}


@pytest.mark.parametrize("source", SCOPES)
def test_time_is_attributed_to_the_named_scope_of_an_instruction(source):
    assert run(fusion("f", US, scope=source.removeprefix("jit(step)/"))).scopes == {SCOPES[source]: about(US)}


def test_an_instruction_without_a_named_scope_is_attributed_to_other():
    text = "ENTRY %e (x: f32[]) -> f32[] {\n  %y = f32[] add(%x, %x)\n}\n"
    assert source_scope(parse_hlo(text).entry.instructions["y"]) == "other"


# (start, limit, step) of a loop counter: trip count
TRIPS = {(0, 32, 1): 32, (0, 32, 2): 16, (1, 32, 2): 16, (0, 33, 2): 17, (4, 4, 1): 0, (9, 4, 1): 0, (-2, 2, 1): 4}


@pytest.mark.parametrize("bounds", TRIPS, ids=str)
def test_a_loop_takes_its_body_times_its_trip_count(bounds):
    """XLA unrolls some loops by two: then the step is 2, and the limit alone would give twice the trip count."""
    start, limit, step = bounds
    body = f"{fusion('f', US)}\n  {all_reduce('r', 'f')}\n  %y = {X} negate(%r)"
    computations, entry = loop("a", body, limit=limit, start=start, step=str(step))
    found, trips = run(entry, computations), TRIPS[bounds]
    assert found.scopes["mlp"] == about(trips * US)
    assert found.comm_seconds == found.exposed_comm_seconds == pytest.approx(trips * ALL_REDUCE)
    assert found.unestimated_bytes == trips * 2 * BYTES


def test_trip_counts_of_nested_loops_multiply_and_one_that_the_compiler_states_is_used():
    inner, run_inner = loop("inner", fusion("f", US), limit=4)
    outer, run_outer = loop("outer", f"{run_inner}\n  {fusion('g', 10 * US)}", limit=3)
    assert run(run_outer, inner + outer).seconds == about(3 * (4 * US + 10 * US))
    computations, entry = loop("a", fusion("f", US), limit=5, step="7")
    entry = entry.rstrip() + ', backend_config={"known_trip_count":{"n":"3"}}'
    assert run(entry, computations).seconds == about(3 * US)


def test_a_loop_with_an_unknown_trip_count_is_rejected():
    computations, entry = loop("a", fusion("f", US), limit=5)
    for old, new in {
        "direction=LT": "direction=NE",
        "constant(1)": "parameter(1)",
        "constant(5)": "parameter(1)",
        "add(%copied": "multiply(%copied",
        "constant(1) ": "constant(-1) ",
    }.items():
        if old in computations:
            with pytest.raises(ValueError, match=r"the trip count of the loop while\.a cannot be determined"):
                run(entry, computations.replace(old, new))


def test_a_done_of_a_transfer_started_in_an_earlier_iteration_does_not_wait():
    body = f"%d = {X} all-gather-done(%x)\n  {gather_start('s')}\n  {fusion('f', US)}"
    computations, entry = loop("a", body, limit=3)
    found = run(entry, computations)
    assert found.comm_seconds == pytest.approx(3 * ALL_GATHER) and found.seconds == about(3 * US)


BRANCHES = "".join(
    f"\n%{name} (y: bf16[]) -> bf16[] {{\n  %x = {X} parameter(0)\n  {body}\n}}\n"
    for name, body in {"short": fusion("f", US), "long": fusion("f", 5 * US), "collective": all_reduce("r")}.items()
)


def test_a_conditional_takes_its_longest_branch_and_a_call_the_time_of_what_it_calls():
    for branches in (
        "branch_computations={%short, %long, %short}", "true_computation=%long, false_computation=%short",
    ):  # fmt: skip
        assert run(f"%i = {X} conditional(%n, %x, %x, %x), {branches}", BRANCHES).seconds == about(5 * US)
    found = run(f"%c = {X} call(%x), to_apply=%collective\n%d = {X} call(%x), to_apply=%short", BRANCHES)
    assert found.seconds == about(ALL_REDUCE + US) and found.comm_seconds == pytest.approx(ALL_REDUCE)
