"""A scheduled HLO module, read from its text: computations, and their instructions in the order they run.

Only what the planner asks for is read: names, opcodes, shapes, operands, called computations, and the compiler's own
estimate of cycles.  The text is `compiled.as_text()`.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

BITS = {"pred": 8, "token": 0, "opaque": 0}
"""Of the types whose name does not end in their number of bits."""

_ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLS = re.compile(r"\b(?:calls|to_apply|body|condition|called_computations)=\{?%?([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    literal: str
    """What stands between the parentheses, as text: a constant's value."""
    attributes: str
    root: bool

    @cached_property
    def cycles(self) -> int | None:
        """The compiler's estimate, where it makes one."""
        found = _CYCLES.search(self.attributes)
        return int(found[1]) if found else None

    @cached_property
    def calls(self) -> str | None:
        """The computation that a fusion or call runs."""
        found = _CALLS.search(self.attributes)
        return found[1] if found else None

    def attribute(self, name: str) -> str | None:
        """The value of `name=` up to the next comma, without a leading %."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None

    @property
    def bytes(self) -> int:
        """Of the result, all arrays of a tuple together, without the padding of layouts."""
        return shape_bytes(self.shape)

    @property
    def source(self) -> str:
        """The path of named scopes and transformations it was traced under; empty where the compiler made it."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclass(frozen=True)
class Computation:
    """Instructions in schedule order, and by name."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions if instruction.root)


@dataclass(frozen=True)
class Module:
    """All computations of a program, and the name of the one it starts with."""

    computations: dict[str, Computation]
    entry: str

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]

    def within(self, name: str) -> Iterator[Instruction]:
        """Every instruction of a computation and of what it calls."""
        for instruction in self.computations[name].instructions:
            yield instruction
            if instruction.calls in self.computations:
                yield from self.within(instruction.calls)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, dims) of every array in the text of a shape."""
    return [(kind, tuple(int(n) for n in dims.split(",") if n)) for kind, dims in _ARRAY.findall(shape)]


def shape_bytes(shape: str) -> int:
    """Bytes of every array in the text of a shape, token and opaque values for nothing."""
    return sum(_bits(kind) * math.prod(dims) for kind, dims in arrays(shape)) // 8


def _bits(kind: str) -> int:
    if kind in BITS:
        return BITS[kind]
    return int(re.match(r"[a-z]+(\d+)", kind)[1])


def parse(text: str) -> Module:
    """The module that `text` describes."""
    computations, entry, name, lines = {}, "", "", []
    for line in text.splitlines():
        if not line.startswith(" "):
            head = _HEAD.match(line)
            if head:
                name, lines = head[2], []
                entry = name if head[1] else entry
            elif line.startswith("}"):
                computations[name] = Computation(name, tuple(lines))
        elif " = " in line and name not in computations:
            lines.append(_instruction(line))
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    name, _, rest = line.strip().partition(" = ")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    return Instruction(
        name=name.removeprefix("ROOT ").lstrip("%"),
        opcode=rest[:opening],
        shape=shape,
        operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        literal=inside,
        attributes=rest[closing + 1 :],
        root=name.startswith("ROOT "),
    )


def _closing(text: str, opening: int) -> int:
    """Where the parenthesis that opens at `opening` closes."""
    depth = 0
    for i in range(opening, len(text)):
        if text[i] == "(":
            depth += 1
        elif text[i] == ")":
            depth -= 1
            if depth == 0:
                return i
    raise ValueError(f"a parenthesis that never closes: {text[:80]}")
