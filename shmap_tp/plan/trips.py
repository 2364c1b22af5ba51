"""How often a loop of a scheduled module runs: from where its counter starts, how far it steps, and its limit.

The compiler unrolls some loops, moves constants into and out of the carried tuple, and copies scalars about, so a
scalar is followed back through copies, tuples and the loops around it until it is a constant.
"""

from dataclasses import dataclass

from shmap_tp.plan.hlo import Computation, Instruction

THROUGH = ("copy", "bitcast", "convert", "copy-done", "copy-start", "reshape")


@dataclass(frozen=True)
class Frame:
    """A computation being walked, and the loop or call around it."""

    computation: Computation
    outer: "Frame | None"
    caller: Instruction | None
    """The instruction of `outer` that runs it."""
    body: Computation | None
    """Of the loop that the caller is: what changes the tuple that this computation gets."""


def trip_count(condition: Computation, body: Frame) -> int:
    """Trips of the loop that is `body`'s caller.  Raises ValueError where its text does not tell."""
    compare = condition.root
    where = body.caller.name
    if compare.opcode != "compare" or compare.attribute("direction") not in ("LT", "GT"):
        raise ValueError(
            f"loop {where}: its condition {compare.name} is {compare.opcode}, not a comparison with a limit"
        )
    inside = Frame(condition, body.outer, body.caller, body.computation)
    sides = [_origin(inside, name) for name in compare.operands]
    counters = [side for side in sides if isinstance(side, _Element) and _step(inside, side.index) != 0]
    if len(counters) != 1:
        raise ValueError(f"loop {where}: which side of {compare.name} counts is not clear")
    index = counters[0].index
    limit = _constant(inside, compare.operands[1 - sides.index(counters[0])])
    start = _constant(body.outer, _element(body.outer, body.caller.operands[0], index))
    return max(0, -(-(limit - start) // _step(inside, index)))


@dataclass(frozen=True)
class _Element:
    """A scalar that a loop carries: its place in the tuple."""

    index: int


def _origin(frame: Frame, name: str) -> Instruction | _Element:
    """The instruction that makes a scalar, or the place of the carried tuple it is read from."""
    while True:
        found = frame.computation.by_name[name]
        if found.opcode == "get-tuple-element":
            holder = frame.computation.by_name[found.operands[0]]
            if holder.opcode == "parameter":
                return _Element(int(found.attribute("index")))
            name = _element(frame, holder.name, int(found.attribute("index")))
        elif found.opcode in THROUGH:
            name = found.operands[0]
        else:
            return found


def _element(frame: Frame, name: str, index: int) -> str:
    """The operand that a tuple holds at `index`."""
    found = frame.computation.by_name[name]
    while found.opcode in ("opt-barrier", "copy"):
        found = frame.computation.by_name[found.operands[0]]
    if found.opcode != "tuple":
        raise ValueError(f"{name} is {found.opcode}, not a tuple: element {index} cannot be followed")
    return found.operands[index]


def _constant(frame: Frame, name: str) -> int:
    found = _origin(frame, name)
    if isinstance(found, _Element):
        if frame.caller is None or _step(frame, found.index) != 0:
            raise ValueError(f"{name}: a scalar that changes, where a constant is wanted")
        return _constant(frame.outer, _element(frame.outer, frame.caller.operands[0], found.index))
    if found.opcode == "constant":
        return int(found.literal)
    if found.opcode in ("add", "subtract", "multiply"):
        a, b = (_constant(frame, operand) for operand in found.operands)
        return {"add": a + b, "subtract": a - b, "multiply": a * b}[found.opcode]
    raise ValueError(f"{name} is made by {found.opcode}: not a constant")


def _step(frame: Frame, index: int) -> int:
    """What one trip of the loop adds to the carried scalar at `index`; 0 outside of loops."""
    if frame.body is None:
        return 0
    root = frame.body.root
    if root.opcode != "tuple":
        raise ValueError(f"loop {frame.caller.name}: its body ends in {root.opcode}, not in a tuple")
    inside = Frame(frame.body, frame.outer, frame.caller, frame.body)
    return _added(inside, root.operands[index], index)


def _added(frame: Frame, name: str, index: int) -> int:
    found = _origin(frame, name)
    if found == _Element(index):
        return 0
    if isinstance(found, Instruction) and found.opcode in ("add", "subtract"):
        sign = 1 if found.opcode == "add" else -1
        sides = [_origin(frame, operand) for operand in found.operands]
        moved = [i for i, side in enumerate(sides) if not (isinstance(side, Instruction) and side.opcode == "constant")]
        if len(moved) == 1:
            other = 1 - moved[0]
            return _added(frame, found.operands[moved[0]], index) + sign * _constant(frame, found.operands[other])
        amounts = [i for i in moved if isinstance(sides[i], _Element) and sides[i].index != index]
        if len(amounts) == 1:
            return _added(frame, found.operands[1 - amounts[0]], index) + sign * _constant(
                frame, found.operands[amounts[0]]
            )
    raise ValueError(f"{name}: what a trip of {frame.computation.name} adds to it is not clear")
