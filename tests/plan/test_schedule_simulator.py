"""Schedules whose time is known by hand: what waits, what is hidden, and how often it all happens.

Modules are written for the 16 devices of a v5e 4x4, one cycle being 1/1.503 ns; attributes and layouts as libtpu 0.0.42
writes them, most left out.
"""

import re

import pytest

from shmap_tp.hardware.devices import DEVICES, GENERATIONS
from shmap_tp.plan.hlo_parser import parse
from shmap_tp.plan.link_model import Links
from shmap_tp.plan.schedule_simulator import (
    COLLECTIVES_WAITED,
    KERNEL_EFFICIENCY,
    SimulatedSchedule,
    simulate,
    source_scope,
)

LINKS = Links.of(GENERATIONS["v5e"], [[x, y, 0, 0] for x in range(4) for y in range(4)])
CLOCK = DEVICES["TPU v5 lite"].clock
MEMORY_RATE = DEVICES["TPU v5 lite"].memory_rate
COLUMN, ROW = [0, 4, 8, 12], [0, 1, 2, 3]
ROWS = "replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}"
COLUMNS = "replica_groups={{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}"
X = "bf16[2048,4096]{1,0:T(8,128)(2,1)}"
BYTES = 2.0 * 2048 * 4096
REDUCE = LINKS.collective("all-reduce", BYTES, ROW)
GATHER = LINKS.collective("all-gather", BYTES, COLUMN)
US = 1e-6
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def run(entry: str, before: str = "") -> SimulatedSchedule:
    """Of an entry computation of these lines, which may use %x; and what must hold whatever they are."""
    spent = simulate(
        parse(f"HloModule step\n{ADD}\n{before}\nENTRY %main (x: bf16[]) -> bf16[] {{\n{lines(entry)}\n}}\n"), LINKS
    )
    assert spent.seconds == pytest.approx(sum(spent.places.values()))
    assert all(seconds >= 0 for seconds in spent.places.values())
    assert spent.exposed_comm_seconds == pytest.approx(spent.places.get(COLLECTIVES_WAITED, 0.0))
    assert spent.exposed_comm_seconds <= spent.comm_seconds * (1 + 1e-9)
    return spent


def lines(entry: str) -> str:
    return f"  %x = {X} parameter(0)\n" + "\n".join("  " + line.strip() for line in entry.strip().splitlines())


def fusion(name: str, seconds: float, operand: str = "x", scope: str = "while/body/mlp/dot") -> str:
    cycles = round(seconds * CLOCK)
    return (
        f'%{name} = {X} fusion(%{operand}), kind=kOutput, calls=%add, metadata={{op_name="jit(step)/{scope}"}}, '
        f'backend_config={{"flag_configs":[],"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    )


def reduce(name: str, operand: str = "x") -> str:
    return f"%{name} = {X} all-reduce(%{operand}), channel_id=1, {ROWS}, use_global_device_ids=true, to_apply=%add"


def gather(name: str, operand: str = "x") -> str:
    part = "bf16[512,4096]{1,0:T(8,128)(2,1)}"
    return (
        f"%{name} = ({part}, {X}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) all-gather-start(%{operand}), channel_id=2, "
        f"{COLUMNS}, dimensions={{0}}, use_global_device_ids=true"
    )


def done(start: str, opcode: str = "all-gather-done") -> str:
    return f"%{start}.done = {X} {opcode}(%{start})"


def about(seconds: float) -> object:
    return pytest.approx(seconds, abs=2e-9, rel=1e-6)  # cycles are whole


# Compute


def test_cycles_are_seconds_by_the_clock():
    spent = run('%f = f32[8]{0} fusion(%x), kind=kLoop, calls=%add, backend_config={"estimated_cycles":"1503"}')
    assert spent.seconds == pytest.approx(US)
    assert spent.comm_seconds == spent.exposed_comm_seconds == spent.unestimated_bytes == 0


def test_without_an_estimate_bytes_in_and_out_take_their_time():
    spent = run(f"%y = {X} multiply(%x, %x)")
    assert spent.unestimated_bytes == 3 * BYTES
    assert spent.seconds == pytest.approx(3 * BYTES / MEMORY_RATE)


def test_names_and_marks_take_none():
    assert (
        run(f"""
        %c = s32[] constant(0)
        %t = ({X}, s32[]) tuple(%x, %c)
        %g = {X} get-tuple-element(%t), index=0
        %b = bf16[8388608]{{0}} bitcast(%g)
        %a = {X} custom-call(), custom_call_target="AllocateBuffer"
        %p = u32[] partition-id()
        """).seconds
        == 0
    )


def test_a_kernel_takes_the_flops_that_it_declares():
    kernel = f'%k = {X} custom-call(%x), custom_call_target="tpu_custom_call"'
    spent = run(kernel + ', backend_config={"custom_call_config":{"cost_estimate":{"flops":"197000000"}}}')
    assert spent.seconds == pytest.approx(US / KERNEL_EFFICIENCY)
    with pytest.raises(ValueError, match="k: a kernel that does not declare its FLOPs"):
        run(kernel)


def splash(phase: str, block: tuple[int, int], q: str, out: str) -> str:
    """A kernel of splash attention as XLA for TPU writes it: over three lines."""
    of_phase, residuals = ("", "residuals") if phase == "fwd" else (f"_{phase}", "no_residuals")
    name = f"splash_mqa_{phase}_{residuals}"
    said = f'{{\\"block_q{of_phase}\\": {block[0]}, \\"block_kv{of_phase}\\": {block[1]}, \\"q_layout\\": 1}}'
    return (
        f'%{name}.1 = {out} custom-call(%x, %x), custom_call_target="tpu_custom_call", '
        f"operand_layout_constraints={{s8[1,4,4]{{2,1,0}}, {q}{{3,2,1,0}}, bf16[8,2048,256]{{2,1,0}}, s32[2048,128]}}, "
        f'frontend_attributes={{kernel_metadata={{\n"xprof_metadata":"{said}"\n}}}}, '
        f'metadata={{op_name="jit(step)/jvp(blocks)/attention/attend/{name}/pallas_call"}}, '
        f'backend_config={{"flag_configs":[],"custom_call_config":{{"body":"TUzv"}}}}'
    )


DQ, DK = "bf16[8,1,2048,256]", "bf16[8,2048,256]"
SPLASH = {
    "forward": ("fwd", (512, 512), DQ, 10 * 512 * 512 * 2),
    "forward, a block": ("fwd", (2048, 2048), DQ, 2048 * 2048 * 2),
    "forward, wide blocks": ("fwd", (512, 1024), DQ, 6 * 512 * 1024 * 2),
    "forward, high blocks": ("fwd", (1024, 512), DQ, 6 * 512 * 1024 * 2),
    "backward": ("dkv", (512, 512), f"(f32[8,512,256], f32[8,512,256], {DK}, {DK})", 10 * 512 * 512 * 4),
    "backward, dq too": ("dkv", (512, 512), f"(f32[8,512,256], bf16[8,4,1,2048,256], {DK}, {DK})", 10 * 512 * 512 * 5),
    "dq": ("dq", (512, 512), f"(f32[8,512,256], {DQ})", 10 * 512 * 512 * 3),
}


@pytest.mark.parametrize("case", SPLASH)
def test_splash_attention_takes_the_products_of_the_blocks_that_it_computes(case):
    """8 heads of 256 and 2048 positions: of 16 blocks of 512, the 10 that the mask does not rule out."""
    phase, block, out, products = SPLASH[case]
    spent = run(splash(phase, block, "bf16[8,1,2048,256]", out))
    flops = 8 * 2 * 256 * products
    assert spent.seconds == pytest.approx(flops / (KERNEL_EFFICIENCY * DEVICES["TPU v5 lite"].flops))
    assert spent.places.keys() == {"attention"}, "what stands behind the kernel's own words is read"


def test_splash_attention_of_unknown_blocks_is_refused():
    kernel = splash("fwd", (512, 512), DQ, DQ)
    for old, new in {"block_kv": "block_k", "bf16[8,1,2048,256]{3": "s8[8,1,2048,256]{3"}.items():
        with pytest.raises(ValueError, match=r"splash_mqa_fwd_residuals\.1: the block sizes and the shape of q"):
            run(kernel.replace(old, new).replace("bf16[8,2048,256]{2", "s8[8,2048,256]{2"))


PLACES = {
    "jit(step)/shard_map/while/body/closed_call/jvp(blocks)/while/body/closed_call/attention/dot_general": "attention",
    "jit(step)/shard_map/while/body/closed_call/transpose(jvp(blocks))/while/body/closed_call/mlp/dot_general": "mlp",
    "jit(step)/shard_map/while/body/closed_call/jvp(blocks)/while/body/add": "blocks, the rest",
    "jit(step)/shard_map/while/body/closed_call/jvp(head)/while/body/closed_call/cross_entropy/reduce_max": "loss",
    "jit(step)/shard_map/while/body/closed_call/transpose(jvp(embedding))/scatter-add": "embedding",
    "jit(step)/shard_map/while/body/closed_call/jvp(head)/while/body/closed_call/dot_general": "head",
    "jit(step)/shard_map/while/body/closed_call/transpose(jvp(head))/mul": "head",
    "jit(step)/shard_map/update/mul": "update",
    "jit(step)/shard_map/dp_gradient_reduction/psum": "update",
    "jit(step)/shard_map/while/body/dynamic_slice": "other",
}


@pytest.mark.parametrize("source", PLACES)
def test_time_is_booked_where_the_source_is(source):
    assert run(fusion("f", US, scope=source.removeprefix("jit(step)/"))).places == {PLACES[source]: about(US)}


def test_an_instruction_from_nowhere_is_other():
    ((computation,),) = [parse("ENTRY %e (x: f32[]) -> f32[] {\n  %y = f32[] add(%x, %x)\n}\n").computations.values()]
    assert source_scope(computation.instructions["y"]) == "other"


# Collectives


def test_a_synchronous_collective_is_exposed_whole():
    spent = run(f"{fusion('f', US)}\n{reduce('r', 'f')}\n{fusion('g', US, 'r')}")
    assert spent.comm_seconds == spent.exposed_comm_seconds == pytest.approx(REDUCE)
    assert spent.seconds == about(2 * US + REDUCE)


@pytest.mark.parametrize("hidden", [0.0, 0.25, 1.0, 3.0])
def test_what_is_computed_meanwhile_hides_a_pair(hidden):
    """Its rest is waited for; where nothing rests, nothing is."""
    spent = run(f"{gather('s')}\n{fusion('f', hidden * GATHER)}\n{done('s')}")
    assert spent.comm_seconds == pytest.approx(GATHER)
    assert spent.exposed_comm_seconds == about(max(0, 1 - hidden) * GATHER)
    assert spent.seconds == about(max(1, hidden) * GATHER)


def test_only_what_stands_between_start_and_done_hides_it():
    spent = run(f"{fusion('f', 9 * GATHER)}\n{gather('s')}\n{done('s')}\n{fusion('g', 9 * GATHER)}")
    assert spent.exposed_comm_seconds == about(GATHER)


def test_two_in_flight_go_one_after_the_other():
    spent = run(f"{gather('s')}\n{gather('t')}\n{fusion('f', 0.5 * GATHER)}\n{done('s')}\n{done('t')}")
    assert spent.comm_seconds == pytest.approx(2 * GATHER)
    assert spent.seconds == about(2 * GATHER)
    assert spent.exposed_comm_seconds == about(1.5 * GATHER)


def test_a_synchronous_one_waits_for_what_is_on_its_wires():
    spent = run(f"{gather('s')}\n{fusion('f', 0.25 * GATHER)}\n{reduce('r', 'f')}\n{done('s')}")
    assert spent.seconds == about(GATHER + REDUCE)
    assert spent.exposed_comm_seconds == about(0.75 * GATHER + REDUCE)


def test_a_wire_that_was_idle_starts_now():
    spent = run(f"{gather('s')}\n{fusion('f', 2 * GATHER)}\n{done('s')}\n{gather('t')}\n{done('t')}")
    assert spent.seconds == about(3 * GATHER)


def test_a_start_holds_operand_and_result_and_only_the_result_counts():
    pairs = "source_target_pairs={{0,1},{1,0}}"
    permuted = run(f"""
    %s = ({X}, {X}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) collective-permute-start(%x), {pairs}
    {done("s", "collective-permute-done")}
    """)
    assert permuted.comm_seconds == pytest.approx(LINKS.permute(BYTES, [(0, 1), (1, 0)]))
    reduced = run(f"""
    %s = ({X}, {X}) all-reduce-start(%x, %y), {ROWS}, to_apply=%add
    {done("s", "all-reduce-done")}
    """)
    assert reduced.comm_seconds == pytest.approx(LINKS.collective("all-reduce", 2 * BYTES, ROW))


@pytest.mark.parametrize(("opcode", "whole"), [("all-gather", 1), ("reduce-scatter", 4), ("all-to-all", 1)])
def test_the_whole_is_the_result_or_for_a_reduce_scatter_all_parts(opcode, whole):
    spent = run(f"%r = {X} {opcode}(%x), {ROWS}, dimensions={{0}}, to_apply=%add")
    assert spent.seconds == pytest.approx(LINKS.collective(opcode, whole * BYTES, ROW))


def test_groups_may_be_numbered():
    for groups, group in {"[4,4]<=[16]": ROW, "[4,4]<=[4,4]T(1,0)": COLUMN, "[1,16]<=[16]": range(16)}.items():
        spent = run(f"%r = {X} all-gather(%x), replica_groups={groups}, dimensions={{0}}")
        assert spent.seconds == pytest.approx(LINKS.collective("all-gather", BYTES, list(group)))


SCATTER = f"""
%all-reduce-scatter.clone.1 (input: bf16[2048,4096]) -> bf16[512,4096] {{
  %input = {X} parameter(0)
  %all-reduce.3 = {X} all-reduce(%input), channel_id=9, {ROWS}, use_global_device_ids=true, to_apply=%add
  ROOT %part = bf16[512,4096]{{1,0}} dynamic-slice(%all-reduce.3, %n, %zero), dynamic_slice_sizes={{512,4096}}
}}
"""


def test_an_all_reduce_of_which_each_keeps_its_part_is_one_reduce_scatter():
    spent = run("%f = bf16[512,4096]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.clone.1", SCATTER)
    assert spent.seconds == spent.comm_seconds == pytest.approx(LINKS.collective("reduce-scatter", BYTES, ROW))
    assert spent.seconds == pytest.approx(REDUCE / 2)


def part(name: str, shape: str, chain: int = 0) -> str:
    """A computation that holds its share of an async gather, as all fusions of a chain do."""
    return f"""
%{name} (part: bf16[512,4096]) -> {shape} {{
  %part = bf16[512,4096]{{1,0}} parameter(0)
  ROOT %all-gather.{name} = {X} all-gather(%part), channel_id={chain}, {COLUMNS}, dimensions={{0}}, \
frontend_attributes={{chain_id="{chain}"}}
}}
"""


def chain(number: int, hidden: float, *, finish: bool = True) -> str:
    """An async gather under a fusion that carries it along for `hidden` seconds, as XLA for v5e writes it."""
    held = f"(bf16[512,4096]{{1,0}}, {X}, s32[2]{{0}}, u32[]{{:S(2)}})"
    carrying = fusion(f"fusion.{number}", hidden, f"held.{number}").replace("calls=%add", f"calls=%meanwhile.{number}")
    start = f"""
    %async-collective-start.{number} = {held} fusion(%x), kind=kCustom, calls=%start.{number}
    %held.{number} = {X} get-tuple-element(%async-collective-start.{number}), index=1
    {carrying}
    %then.{number} = {X} get-tuple-element(%fusion.{number}), index=1
    """
    end = f"%async-collective-done.{number} = {X} fusion(%then.{number}), kind=kCustom, calls=%done.{number}"
    return start + (end if finish else "")


def chained(*numbers: int) -> str:
    return "".join(part(f"{name}.{n}", X, n) for n in numbers for name in ("start", "meanwhile", "done"))


@pytest.mark.parametrize("hidden", [0.25, 3.0])
def test_a_gather_that_fusions_carry_along_is_one_and_they_hide_it(hidden):
    spent = run(chain(0, hidden * GATHER), chained(0))
    assert spent.comm_seconds == pytest.approx(GATHER)
    assert spent.places["mlp"] == about(hidden * GATHER)
    assert spent.exposed_comm_seconds == about(max(0, 1 - hidden) * GATHER)


def test_chains_are_told_apart():
    """The first is waited for last: by then it is over, and the second, behind it on the wires, not yet."""
    second = chain(1, 0.5 * GATHER)
    first_done = chain(0, GATHER).strip().splitlines()[-1]
    spent = run(f"{chain(0, GATHER, finish=False)}\n{second}\n{first_done}", chained(0, 1))
    assert spent.comm_seconds == pytest.approx(2 * GATHER)
    assert spent.exposed_comm_seconds == about(0.5 * GATHER)
    spent = run(f"{chain(0, 0, finish=False)}\n{chain(1, 0, finish=False)}\n{first_done}", chained(0, 1))
    assert spent.exposed_comm_seconds == about(GATHER)  # and not for the second


def test_an_async_computation_is_what_it_holds():
    inside = f"""
%wrapped (a: bf16[512,4096]) -> bf16[2048,4096] {{
  %a = bf16[512,4096]{{1,0}} parameter(0)
  ROOT %g = {X} reduce-scatter(%a), {ROWS}, dimensions={{0}}, to_apply=%add
}}
"""
    spent = run(
        f"""
    %s = ((bf16[512,4096]{{1,0}}), {X}, u32[]) async-start(%x), calls=%wrapped
    {fusion("f", US)}
    %d = {X} async-done(%s), calls=%wrapped
    """,
        inside,
    )
    scatter = LINKS.collective("reduce-scatter", 4 * BYTES, ROW)
    assert spent.comm_seconds == pytest.approx(scatter) and spent.exposed_comm_seconds == about(scatter - US)


# Loops and branches


def loop(name: str, body: str, *, limit: int, start: int = 0, step: str = "1", call: str = "") -> tuple[str, str]:
    """(the computations of a loop, the lines that call it), its counter as XLA for TPU writes it."""
    carried = f"(s32[]{{:T(128)}}, {X})"
    computations = f"""
%body.{name} (p: {carried}) -> {carried} {{
  %one = s32[]{{:T(128)}} constant({step})
  %p = {carried} parameter(0)
  %x = {X} get-tuple-element(%p), index=1
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %copied = s32[]{{:T(128)S(6)}} bitcast(%i)
  {body}
  %next = s32[]{{:T(128)}} add(%copied, %one), backend_config={{"estimated_cycles":"0"}}
  ROOT %t = {carried} tuple(%next, %x)
}}

%condition.{name} (p.1: {carried}) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant({limit})
  %p.1 = {carried} parameter(0)
  %i.1 = s32[]{{:T(128)}} get-tuple-element(%p.1), index=0
  ROOT %lt = pred[]{{:T(512)}} compare(%i.1, %limit), direction=LT
}}
"""
    return (
        computations,
        f"""
  %first.{name} = s32[]{{:T(128)}} constant({start})
  %init.{name} = {carried} tuple(%first.{name}, %x)
  %while.{name} = {carried} while(%init.{name}), condition=%condition.{name}, body=%body.{name}
""",
    )


TRIPS = {(0, 32, 1): 32, (0, 32, 2): 16, (1, 32, 2): 16, (0, 33, 2): 17, (4, 4, 1): 0, (9, 4, 1): 0, (-2, 2, 1): 4}


@pytest.mark.parametrize("bounds", TRIPS, ids=str)
def test_a_loop_takes_as_long_as_all_its_trips(bounds):
    """XLA unrolls some loops by two: the step is then 2, and the limit alone says twice the trips."""
    start, limit, step = bounds
    body = f"{fusion('f', US)}\n  {reduce('r', 'f')}\n  %y = {X} negate(%r)"
    before, calls = loop("a", body, limit=limit, start=start, step=str(step))
    spent, times = run(calls, before), TRIPS[bounds]
    assert spent.places["mlp"] == about(times * US)
    assert spent.comm_seconds == spent.exposed_comm_seconds == pytest.approx(times * REDUCE)
    assert spent.unestimated_bytes == times * 2 * BYTES


def test_a_known_trip_count_is_taken():
    before, calls = loop("a", fusion("f", US), limit=5, step="7")
    calls = calls.rstrip() + ', backend_config={"known_trip_count":{"n":"3"}}'
    assert run(calls, before).seconds == about(3 * US)


def test_loops_in_loops_multiply():
    inner, calls = loop("inner", fusion("f", US), limit=4)
    outer, start = loop("outer", f"{calls}\n  {fusion('g', 10 * US)}", limit=3)
    assert run(start, inner + outer).seconds == about(3 * (4 * US + 10 * US))


def test_an_unreadable_loop_is_refused():
    before, calls = loop("a", fusion("f", US), limit=5)
    for old, new in {
        "direction=LT": "direction=NE",
        "constant(1)": "parameter(1)",
        "constant(5)": "parameter(1)",
        "add(%copied": "multiply(%copied",
        "constant(1) ": "constant(-1) ",
    }.items():
        if old in before:
            with pytest.raises(ValueError, match=r"how often the loop while\.a runs cannot be read"):
                run(calls, before.replace(old, new))


def test_a_done_whose_start_was_in_an_earlier_trip_waits_for_nothing():
    before, calls = loop("a", f"%d = {X} all-gather-done(%x)\n  {gather('s')}\n  {fusion('f', US)}", limit=3)
    spent = run(calls, before)
    assert spent.comm_seconds == pytest.approx(3 * GATHER) and spent.seconds == about(3 * US)


BRANCHES = "".join(
    f"\n%{name} (y: bf16[]) -> bf16[] {{\n  %x = {X} parameter(0)\n  {body}\n}}\n"
    for name, body in {"short": fusion("f", US), "long": fusion("f", 5 * US), "wire": reduce("r")}.items()
)


@pytest.mark.parametrize(
    "attributes",
    ["branch_computations={%short, %long, %short}", "true_computation=%long, false_computation=%short"],
)
def test_of_branches_the_longest_is_taken(attributes):
    assert run(f"%i = {X} conditional(%n, %x, %x, %x), {attributes}", BRANCHES).seconds == about(5 * US)


def test_a_call_takes_what_is_called():
    spent = run(f"%c = {X} call(%x), to_apply=%wire\n%d = {X} call(%x), to_apply=%short", BRANCHES)
    assert spent.seconds == about(REDUCE + US) and spent.comm_seconds == pytest.approx(REDUCE)


# Other things that are started


def copy(name: str, shape: str = X, opcode: str = "copy") -> str:
    return f"%{name} = ({shape}, {X}, u32[]{{:S(2)}}) {opcode}-start(%x)"


def test_copies_run_beside_compute_and_are_no_communication():
    """And beside collectives, on wires of their own; one after the other among themselves."""
    once = BYTES / MEMORY_RATE
    hidden = run(f"{copy('c')}\n{fusion('f', 2 * once)}\n{done('c', 'copy-done')}")
    assert hidden.places == {"mlp": about(2 * once), "waiting for copies": 0}
    spent = run(f"{copy('c')}\n{copy('d')}\n{gather('s')}\n{done('c', 'copy-done')}\n{done('d', 'copy-done')}")
    assert spent.places["waiting for copies"] == spent.seconds == about(2 * once)
    assert spent.exposed_comm_seconds == 0 and spent.comm_seconds == pytest.approx(GATHER)


HOST_RATE = GENERATIONS["v5e"].host_rate


def test_what_the_host_keeps_goes_there_and_back_beside_everything_else():
    """Writes one after the other, reads too, both at once."""
    once = 2 * 16 * 4096 / HOST_RATE
    all_of_it, part = "bf16[8,16,4096]{2,1,0:T(8,128)(2,1)S(5)}", "bf16[1,16,4096]{2,1,0:T(8,128)(2,1)}"

    def write(name: str) -> str:
        return f"%{name} = (({all_of_it}, {part}, s32[]), {all_of_it}, u32[]{{:S(2)}}) dynamic-update-slice-start(%x)"

    def read(name: str) -> str:
        return f"%{name} = (({all_of_it}, s32[]), {part}, u32[]{{:S(2)}}) dynamic-slice-start(%x)"

    both = f"{write('w')}\n{read('r')}\n{copy('c')}\n{fusion('f', once / 2)}"
    waits = f"{done('w', 'dynamic-update-slice-done')}\n{done('r', 'dynamic-slice-done')}"
    spent = run(f"{both}\n{waits}")
    assert spent.seconds == about(once) and spent.comm_seconds == 0
    assert spent.places == {"mlp": about(once / 2), "waiting for the host, writes": about(once / 2)} | dict.fromkeys(
        ["waiting for the host, reads"], about(0)
    )
    assert run(f"{write('w')}\n{write('v')}\n{done('v', 'dynamic-update-slice-done')}").seconds == about(2 * once)
    assert run(f"{read('r')}\n{read('q')}\n{done('q', 'dynamic-slice-done')}").seconds == about(2 * once)


@pytest.mark.parametrize(
    ("result", "source", "where"),
    [("S(5)", "", "the host, writes"), ("", "S(5)", "the host, reads"), ("S(1)", "", "copies")],
)
def test_a_copy_says_by_its_result_where_it_goes(result, source, where):
    to, of = (f"bf16[16,4096]{{1,0:T(8,128)(2,1){space}}}" for space in (result, source))
    spent = run(f"%c = ({to}, {of}, u32[]) copy-start(%x)\n{done('c', 'copy-done')}")
    assert spent.places == {f"waiting for {where}": spent.seconds}


def test_of_a_slice_only_what_is_taken_is_copied():
    taken = "bf16[16,4096]{1,0}"
    spent = run(f"%s = (({X}), {taken}, s32[]) slice-start(%x)\n%s.done = {taken} slice-done(%s)")
    assert spent.seconds == pytest.approx(2 * 16 * 4096 / MEMORY_RATE)


def test_what_the_sparse_cores_do_is_waited_for_and_no_communication():
    called = "\n%lookup (a: bf16[]) -> bf16[] {\n  %a = bf16[] parameter(0)\n" + (
        '  ROOT %g = bf16[] fusion(%a), calls=%add, backend_config={"estimated_cycles":"9223372036854775807"}\n}\n'
    )
    starts = f"""
    %s = (({X}), bf16[64,4096]{{1,0}}, u32[]{{:S(8)}}) call-start(%x), to_apply=%lookup
    {fusion("f", US)}
    %d = bf16[64,4096]{{1,0}} call-done(%s)
    """
    moved = sum(2 * rows * 4096 for rows in (2048, 2048, 64)) + 4
    spent = run(starts, called)
    assert spent.seconds == about(moved / MEMORY_RATE) and spent.comm_seconds == 0
    assert spent.places["waiting for sparse cores"] == about(moved / MEMORY_RATE - US)


def by_sparse_cores(name: str, *collectives: str) -> tuple[str, str]:
    """(its start, the computation that it calls), as libtpu 0.0.42 writes them for v5p and v6e."""
    inside = "\n".join(f"  {each}" for each in collectives)
    called = f"\n%called.{name} (a: bf16[]) -> bf16[] {{\n  %a = bf16[2048,4096]{{1,0}} parameter(0)\n{inside}\n}}\n"
    config = 'backend_config={"sparse_core_config":{"offload":"OFFLOAD_COLLECTIVE","core_type":"CORE_TYPE_SC"}}'
    start = f'(({X}, token[]), {X}) call-start(%x, %x), async_execution_thread="sparsecore", to_apply=%called.{name}'
    return f"%{name} = {start}, {config}", called


@pytest.mark.parametrize("kind, rows", [("all-gather", 2048), ("reduce-scatter", 512)])
def test_a_collective_of_the_sparse_cores_is_on_the_links(kind, rows):
    start, called = by_sparse_cores("s", f"ROOT %c = bf16[{rows},4096]{{1,0}} {kind}(%a), {COLUMNS}, dimensions={{0}}")
    takes = LINKS.collective(kind, BYTES, COLUMN)
    alone = run(f"{start}\n{fusion('f', US)}\n{done('s', 'call-done')}", called)
    assert alone.comm_seconds == pytest.approx(takes) and alone.exposed_comm_seconds == about(takes - US)
    hidden = run(f"{start}\n{fusion('f', 2 * takes)}\n{done('s', 'call-done')}", called)
    assert hidden.seconds == about(2 * takes) and hidden.exposed_comm_seconds == 0
    beside = run(f"{start}\n{gather('g')}\n{done('g')}\n{done('s', 'call-done')}", called)
    assert beside.seconds == about(takes + GATHER), "they share the links"


def test_two_collectives_in_one_call_are_refused():
    each = f"all-gather(%a), {COLUMNS}, dimensions={{0}}"
    start, called = by_sparse_cores("s", f"%b = {X} {each}", f"ROOT %c = {X} {each}")
    with pytest.raises(ValueError, match="s: more than one collective in a call"):
        run(start, called)


def network(slices: str, size: int = 65536, number: int = 0) -> str:
    """An all-reduce between slices, as XLA writes it for megascale."""
    held = f"(f32[{size},8,128]{{2,1,0:T(8,128)}}, u32[], token[])"
    how = (
        f'frontend_attributes={{_xla_host_transfer_rendezvous="psum.{number}",'
        f'_xla_megascale_target="{{{slices}}}x{{0:3}}",_xla_megascale_transfer_type="ALL_REDUCE"}}'
    )
    return f"""
    %send.{number} = {held} send(%x, %token), channel_id=14, is_host_transfer=true, {how}
    %recv.{number} = {held} recv(%token), channel_id=13, is_host_transfer=true, {how}
    """


FINISH = """
%send-done.0 = token[] send-done(%send.0), channel_id=14
%recv-done.0 = (f32[65536,8,128]{2,1,0}, token[]) recv-done(%recv.0), channel_id=13
"""


@pytest.mark.parametrize("slices", ["1,2", "1,2,3,4", ",".join(map(str, range(1, 33)))])
def test_what_goes_between_slices_takes_the_network_once(slices):
    count = len(slices.split(","))
    once = LINKS.network("all-reduce", 4.0 * 65536 * 8 * 128 + 4, count)
    assert once > 4 * 65536 * 8 * 128 * 2 * (count - 1) / count / 6.25e9
    spent = run(network(slices) + FINISH)
    assert spent.seconds == spent.comm_seconds == spent.exposed_comm_seconds == pytest.approx(once)
    hidden = run(network(slices) + gather("s") + "\n" + done("s") + FINISH)
    assert hidden.comm_seconds == pytest.approx(once + GATHER)
    assert hidden.seconds == hidden.exposed_comm_seconds == about(once)  # the links are other wires


def test_how_many_slices_must_be_said():
    with pytest.raises(ValueError, match=r"send\.0: how many slices meet cannot be read"):
        run(re.sub("_xla_megascale_target=[^,]*,2}", "_target=", network("1,2")))


# What is not known


def test_an_unknown_start_is_refused():
    with pytest.raises(ValueError, match="s: ragged-all-to-all-start starts nothing that is known here"):
        run(f"%s = ({X}, {X}) ragged-all-to-all-start(%x), {ROWS}")
    with pytest.raises(ValueError, match="s: async-start starts nothing that is known here"):
        run(f"%s = (({X}), {X}) async-start(%x), calls=%add")
