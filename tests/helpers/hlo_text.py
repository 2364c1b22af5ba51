"""HLO text of small scheduled TPU modules, for tests of the schedule simulator.

Modules are written for the 16 devices of a v5e 4x4, whose clock is 1.503 GHz; attributes and layouts as libtpu 0.0.42
prints them, most of them omitted.
"""

import pytest

from shmap_tp.hardware.devices import DEVICES, GENERATIONS
from shmap_tp.plan.hlo_parser import parse_hlo
from shmap_tp.plan.schedule_simulator import WAITING_FOR_COLLECTIVES, SimulatedSchedule, simulate
from shmap_tp.plan.tpu import LinkModel

LINK_MODEL = LinkModel.of(GENERATIONS["v5e"], [[x, y, 0, 0] for x in range(4) for y in range(4)])
CLOCK = DEVICES["TPU v5 lite"].clock
MEMORY_RATE = DEVICES["TPU v5 lite"].memory_rate
COLUMN, ROW = [0, 4, 8, 12], [0, 1, 2, 3]
ROWS = "replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}"
COLUMNS = "replica_groups={{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}"
X = "bf16[2048,4096]{1,0:T(8,128)(2,1)}"
BYTES = 2.0 * 2048 * 4096
ALL_REDUCE = LINK_MODEL.collective_seconds("all-reduce", BYTES, ROW)
ALL_GATHER = LINK_MODEL.collective_seconds("all-gather", BYTES, COLUMN)
US = 1e-6
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def module_text(entry: str, computations: str = "") -> str:
    """A module whose entry computation consists of these lines, which may use the parameter %x."""
    lines = "\n".join("  " + line.strip() for line in entry.strip().splitlines())
    return (
        f"HloModule step\n{ADD}\n{computations}\nENTRY %main (x: bf16[]) -> bf16[] {{\n"
        f"  %x = {X} parameter(0)\n{lines}\n}}\n"
    )


def run(entry: str, computations: str = "") -> SimulatedSchedule:
    """Simulate `module_text`, and check what holds for every schedule."""
    found = simulate(parse_hlo(module_text(entry, computations)), LINK_MODEL)
    assert found.seconds == pytest.approx(sum(found.scopes.values()))
    assert all(seconds >= 0 for seconds in found.scopes.values())
    assert found.exposed_comm_seconds == pytest.approx(found.scopes.get(WAITING_FOR_COLLECTIVES, 0.0))
    assert found.exposed_comm_seconds <= found.comm_seconds * (1 + 1e-9)
    return found


def fusion(name: str, seconds: float, operand: str = "x", scope: str = "while/body/mlp/dot") -> str:
    """A compute fusion of this duration."""
    cycles = round(seconds * CLOCK)
    return (
        f'%{name} = {X} fusion(%{operand}), kind=kOutput, calls=%add, metadata={{op_name="jit(step)/{scope}"}}, '
        f'backend_config={{"flag_configs":[],"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    )


def all_reduce(name: str, operand: str = "x") -> str:
    """A synchronous all-reduce of X over a row; it takes ALL_REDUCE seconds."""
    return f"%{name} = {X} all-reduce(%{operand}), channel_id=1, {ROWS}, use_global_device_ids=true, to_apply=%add"


def gather_start(name: str, operand: str = "x") -> str:
    """The start of an asynchronous all-gather to X over a column; it takes ALL_GATHER seconds."""
    shard = "bf16[512,4096]{1,0:T(8,128)(2,1)}"
    return (
        f"%{name} = ({shard}, {X}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) all-gather-start(%{operand}), channel_id=2, "
        f"{COLUMNS}, dimensions={{0}}, use_global_device_ids=true"
    )


def done(start: str, opcode: str = "all-gather-done") -> str:
    return f"%{start}.done = {X} {opcode}(%{start})"


def about(seconds: float) -> object:
    """Equal up to the rounding of cycles to whole numbers."""
    return pytest.approx(seconds, abs=2e-9, rel=1e-6)


def loop(name: str, body: str, *, limit: int, start: int = 0, step: str = "1") -> tuple[str, str]:
    """(the computations of a loop, the lines that run it), with its counter as XLA for TPU prints it."""
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
