"""Simulated schedules with collectives, whose time is known by hand: what is exposed, and what is overlapped."""

import pytest

from tests.helpers.hlo_text import (
    ALL_GATHER,
    ALL_REDUCE,
    BYTES,
    COLUMN,
    COLUMNS,
    LINK_MODEL,
    ROW,
    ROWS,
    US,
    X,
    about,
    all_reduce,
    done,
    fusion,
    gather_start,
    run,
)  # fmt: skip


def test_a_synchronous_collective_is_fully_exposed():
    found = run(f"{fusion('f', US)}\n{all_reduce('r', 'f')}\n{fusion('g', US, 'r')}")
    assert found.comm_seconds == found.exposed_comm_seconds == pytest.approx(ALL_REDUCE)
    assert found.seconds == about(2 * US + ALL_REDUCE)


@pytest.mark.parametrize("compute", [0.0, 0.25, 1.0, 3.0])
def test_compute_between_start_and_done_overlaps_a_collective(compute):
    """What it does not cover is exposed."""
    found = run(f"{gather_start('s')}\n{fusion('f', compute * ALL_GATHER)}\n{done('s')}")
    assert found.comm_seconds == pytest.approx(ALL_GATHER)
    assert found.exposed_comm_seconds == about(max(0, 1 - compute) * ALL_GATHER)
    assert found.seconds == about(max(1, compute) * ALL_GATHER)


F = {part: fusion("f", part * ALL_GATHER) for part in (0.25, 0.5, 2, 9)}
SCHEDULES = {
    "compute before start and after done overlaps nothing": (
        [F[9], gather_start("s"), done("s"), fusion("g", 9 * ALL_GATHER)], 19 * ALL_GATHER, ALL_GATHER,
    ),
    "two in flight run one after the other": (
        [gather_start("s"), gather_start("t"), F[0.5], done("s"), done("t")], 2 * ALL_GATHER, 1.5 * ALL_GATHER,
    ),
    "a synchronous one waits for those in flight": (
        [gather_start("s"), F[0.25], all_reduce("r", "f"), done("s")], ALL_GATHER + ALL_REDUCE,
        0.75 * ALL_GATHER + ALL_REDUCE,
    ),
    "idle links start one at once": (
        [gather_start("s"), F[2], done("s"), gather_start("t"), done("t")], 3 * ALL_GATHER, ALL_GATHER,
    ),
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_collectives_occupy_the_links_in_order(schedule):
    lines, seconds, exposed = SCHEDULES[schedule]
    found = run("\n".join(lines))
    assert (found.seconds, found.exposed_comm_seconds) == (about(seconds), about(exposed))


def test_only_the_results_of_a_start_are_counted():
    """Its shape lists operands and results."""
    pairs = "source_target_pairs={{0,1},{1,0}}"
    permuted = run(f"""
    %s = ({X}, {X}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) collective-permute-start(%x), {pairs}
    {done("s", "collective-permute-done")}
    """)
    assert permuted.comm_seconds == pytest.approx(LINK_MODEL.permute_seconds(BYTES, [(0, 1), (1, 0)]))
    reduced = run(f"""
    %s = ({X}, {X}) all-reduce-start(%x, %y), {ROWS}, to_apply=%add
    {done("s", "all-reduce-done")}
    """)
    assert reduced.comm_seconds == pytest.approx(LINK_MODEL.collective_seconds("all-reduce", 2 * BYTES, ROW))


@pytest.mark.parametrize(("opcode", "full"), [("all-gather", 1), ("reduce-scatter", 4), ("all-to-all", 4)])
def test_the_full_array_is_the_result_of_a_gather_and_else_those_of_all_devices(opcode, full):
    found = run(f"%r = {X} {opcode}(%x), {ROWS}, dimensions={{0}}, to_apply=%add")
    assert found.seconds == pytest.approx(LINK_MODEL.collective_seconds(opcode, full * BYTES, ROW))


SCATTER = f"""
%all-reduce-scatter.clone.1 (input: bf16[2048,4096]) -> bf16[512,4096] {{
  %input = {X} parameter(0)
  %all-reduce.3 = {X} all-reduce(%input), channel_id=9, {ROWS}, use_global_device_ids=true, to_apply=%add
  ROOT %part = bf16[512,4096]{{1,0}} dynamic-slice(%all-reduce.3, %n, %zero), dynamic_slice_sizes={{512,4096}}
}}
"""


def test_an_all_reduce_followed_by_a_slice_is_one_reduce_scatter():
    found = run("%f = bf16[512,4096]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.clone.1", SCATTER)
    scatter = LINK_MODEL.collective_seconds("reduce-scatter", BYTES, ROW)
    assert found.seconds == found.comm_seconds == pytest.approx(scatter)
    assert found.seconds == pytest.approx(ALL_REDUCE / 2)


def chain_part(name: str, number: int) -> str:
    """A computation that contains an asynchronous gather, as every fusion of a chain does."""
    return f"""
%{name} (part: bf16[512,4096]) -> {X} {{
  %part = bf16[512,4096]{{1,0}} parameter(0)
  ROOT %all-gather.{name} = {X} all-gather(%part), channel_id={number}, {COLUMNS}, dimensions={{0}}, \
frontend_attributes={{chain_id="{number}"}}
}}
"""


def chain(number: int, compute: float, *, finish: bool = True) -> str:
    """An asynchronous gather carried along by a fusion of `compute` seconds, as XLA for v5e prints it."""
    state = f"(bf16[512,4096]{{1,0}}, {X}, s32[2]{{0}}, u32[]{{:S(2)}})"
    carrying = fusion(f"fusion.{number}", compute, f"held.{number}").replace("calls=%add", f"calls=%meanwhile.{number}")
    start = f"""
    %async-collective-start.{number} = {state} fusion(%x), kind=kCustom, calls=%start.{number}
    %held.{number} = {X} get-tuple-element(%async-collective-start.{number}), index=1
    {carrying}
    %then.{number} = {X} get-tuple-element(%fusion.{number}), index=1
    """
    end = f"%async-collective-done.{number} = {X} fusion(%then.{number}), kind=kCustom, calls=%done.{number}"
    return start + (end if finish else "")


def chain_computations(*numbers: int) -> str:
    return "".join(chain_part(f"{name}.{n}", n) for n in numbers for name in ("start", "meanwhile", "done"))


@pytest.mark.parametrize("compute", [0.25, 3.0])
def test_a_gather_carried_along_by_fusions_is_counted_once_and_overlaps_them(compute):
    found = run(chain(0, compute * ALL_GATHER), chain_computations(0))
    assert found.comm_seconds == pytest.approx(ALL_GATHER)
    assert found.scopes["mlp"] == about(compute * ALL_GATHER)
    assert found.exposed_comm_seconds == about(max(0, 1 - compute) * ALL_GATHER)


def test_chains_are_distinguished_by_their_id():
    """The first is awaited last: by then it has ended, while the second, queued behind it, has not."""
    second = chain(1, 0.5 * ALL_GATHER)
    first_done = chain(0, ALL_GATHER).strip().splitlines()[-1]
    found = run(f"{chain(0, ALL_GATHER, finish=False)}\n{second}\n{first_done}", chain_computations(0, 1))
    assert found.comm_seconds == pytest.approx(2 * ALL_GATHER)
    assert found.exposed_comm_seconds == about(0.5 * ALL_GATHER)
    found = run(f"{chain(0, 0, finish=False)}\n{chain(1, 0, finish=False)}\n{first_done}", chain_computations(0, 1))
    assert found.exposed_comm_seconds == about(ALL_GATHER)  # and not for the second


def test_an_async_computation_takes_the_time_of_the_collective_inside():
    wrapped = f"""
%wrapped (a: bf16[512,4096]) -> bf16[2048,4096] {{
  %a = bf16[512,4096]{{1,0}} parameter(0)
  ROOT %g = {X} reduce-scatter(%a), {ROWS}, dimensions={{0}}, to_apply=%add
}}
"""
    entry = f"""
    %s = ((bf16[512,4096]{{1,0}}), {X}, u32[]) async-start(%x), calls=%wrapped
    {fusion("f", US)}
    %d = {X} async-done(%s), calls=%wrapped
    """
    found = run(entry, wrapped)
    scatter = LINK_MODEL.collective_seconds("reduce-scatter", 4 * BYTES, ROW)
    assert found.comm_seconds == pytest.approx(scatter) and found.exposed_comm_seconds == about(scatter - US)


def sparse_core_call(name: str, *collectives: str) -> tuple[str, str]:
    """(its start, the computation that it calls), as libtpu 0.0.42 prints them for v5p and v6e."""
    body = "\n".join(f"  {each}" for each in collectives)
    called = f"\n%called.{name} (a: bf16[]) -> bf16[] {{\n  %a = bf16[2048,4096]{{1,0}} parameter(0)\n{body}\n}}\n"
    config = 'backend_config={"sparse_core_config":{"offload":"OFFLOAD_COLLECTIVE","core_type":"CORE_TYPE_SC"}}'
    start = f'(({X}, token[]), {X}) call-start(%x, %x), async_execution_thread="sparsecore", to_apply=%called.{name}'
    return f"%{name} = {start}, {config}", called


@pytest.mark.parametrize("kind, rows", [("all-gather", 2048), ("reduce-scatter", 512)])
def test_a_collective_executed_by_the_sparse_cores_uses_the_links(kind, rows):
    start, called = sparse_core_call("s", f"ROOT %c = bf16[{rows},4096]{{1,0}} {kind}(%a), {COLUMNS}, dimensions={{0}}")
    seconds = LINK_MODEL.collective_seconds(kind, BYTES, COLUMN)
    alone = run(f"{start}\n{fusion('f', US)}\n{done('s', 'call-done')}", called)
    assert alone.comm_seconds == pytest.approx(seconds) and alone.exposed_comm_seconds == about(seconds - US)
    overlapped = run(f"{start}\n{fusion('f', 2 * seconds)}\n{done('s', 'call-done')}", called)
    assert overlapped.seconds == about(2 * seconds) and overlapped.exposed_comm_seconds == 0
    with_gather = run(f"{start}\n{gather_start('g')}\n{done('g')}\n{done('s', 'call-done')}", called)
    assert with_gather.seconds == about(seconds + ALL_GATHER), "they share the links"


def test_a_call_with_two_collectives_and_an_unknown_asynchronous_operation_are_rejected():
    each = f"all-gather(%a), {COLUMNS}, dimensions={{0}}"
    start, called = sparse_core_call("s", f"%b = {X} {each}", f"ROOT %c = {X} {each}")
    for line, message in {
        start: "more than one collective in a call",
        f"%s = ({X}, {X}) ragged-all-to-all-start(%x), {ROWS}": "ragged-all-to-all-start is an unknown kind of async",
        f"%s = (({X}), {X}) async-start(%x), calls=%add": "async-start is an unknown kind of asynchronous operation",
    }.items():
        with pytest.raises(ValueError, match=f"s: {message}"):
            run(line, called)
