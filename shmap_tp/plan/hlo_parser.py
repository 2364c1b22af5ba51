"""The text of a compiled module: its computations, and how often each of them runs in one run of the whole.

`compiled.as_text()` of XLA for CPU, GPU or TPU.  A computation is a list of instructions, one to a line:

    %name = f32[4,8]{1,0:T(8,128)} opcode(%operand, %operand), attribute=..., calls=%computation, backend_config={...}

XLA for CPU says how often a loop runs; XLA for TPU does not, so it is read off its counter: where it starts, what its
body adds, and the limit in its condition.
"""

import math
import re
from dataclasses import dataclass
from functools import cached_property

ARRAY = re.compile(r"\b(pred|token|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")


LINE = re.compile(r"\s+(ROOT )?%?(\S+) = (.*?) ([a-z][\w\-]*)\((.*)$")


CALLED = re.compile(r"\b(calls|to_apply|body|condition|called_computations|[a-z]+_computations?)=(\{[^}]*\}|%[^\s,)]+)")


METADATA = re.compile(r"(kernel_metadata=\{)\n\s*([^\n]*)\n\s*(\}\})")
"""What a Pallas kernel says of itself stands on a line of its own, the only thing that is broken into lines."""


BRANCHES = {"branch_computations", "true_computation", "false_computation"}


ALREADY_RUNNING = ("-done", "-update")
"""The end of an asynchronous instruction names the computation that its start has run."""


@dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    """As written: f32[4,8]{1,0}, or a tuple of them."""
    opcode: str
    inside: str
    """What stands between its parentheses: operands, or the value of a constant."""
    attributes: str
    """The rest of the line."""
    is_root: bool

    @cached_property
    def cycles(self) -> int | None:
        """XLA for TPU's own estimate of how long it takes, where it makes one."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([^\s,)]+)", self.inside)

    @property
    def called(self) -> list[tuple[str, str]]:
        """(attribute, name of the computation it names)."""
        found = CALLED.findall(self.attributes)
        return [(attribute, name) for attribute, names in found for name in re.findall(r"%([^\s,{}]+)", names)]


@dataclass(frozen=True)
class Computation:
    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions.values() if instruction.is_root)

    def behind(self, name: str) -> Instruction:
        """The instruction that made the value called `name`, through copies."""
        instruction = self.instructions[name]
        while instruction.opcode in ("copy", "bitcast"):
            instruction = self.instructions[instruction.operands[0]]
        return instruction

    def shape_of(self, name: str) -> str:
        return self.instructions[name].shape


@dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    """In the order of the text: whatever a computation calls stands before it, and the entry last."""

    @cached_property
    def runs(self) -> dict[str, float]:
        """How often each computation runs in one run of the module; NaN where that cannot be read, as in a branch."""
        found = dict.fromkeys(self.computations, 0.0)
        for number, computation in enumerate(reversed(self.computations.values())):
            found[computation.name] += number == 0
            for instruction in computation.instructions.values():
                if not instruction.opcode.endswith(ALREADY_RUNNING):
                    for attribute, name in instruction.called:
                        found[name] += found[computation.name] * self._times(computation, instruction, attribute)
        return found

    def _times(self, computation: Computation, instruction: Instruction, attribute: str) -> float:
        if attribute in BRANCHES:
            return math.nan
        return self.trips(computation, instruction) if instruction.opcode == "while" else 1.0

    def trips(self, computation: Computation, loop: Instruction) -> float:
        """How often the body of a while loop runs; NaN where it cannot be read."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
        if known:
            return float(known[1])
        condition, body = (self.computations[dict(loop.called)[part]] for part in ("condition", "body"))
        test = condition.root
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return math.nan
        counter, limit = (condition.behind(operand) for operand in test.operands)
        index = _place(counter)
        initial, following = computation.behind(loop.operands[0]), body.root
        if index is None or limit.opcode != "constant" or {initial.opcode, following.opcode} != {"tuple"}:
            return math.nan
        start = computation.behind(initial.operands[index])
        step = _added(body, body.behind(following.operands[index]), index)
        if start.opcode != "constant" or step <= 0:
            return math.nan
        return float(max(0, math.ceil((int(limit.inside) - int(start.inside)) / step)))


def _place(instruction: Instruction) -> int | None:
    """Which element of a tuple a get-tuple-element takes."""
    index = re.search(r"\bindex=(\d+)", instruction.attributes)
    return int(index[1]) if instruction.opcode == "get-tuple-element" and index else None


def _added(body: Computation, value: Instruction, index: int) -> int:
    """What `value` adds to element `place` of the body's argument; 0 where that is no constant."""
    total = 0
    while value.opcode == "add":
        terms = [body.behind(operand) for operand in value.operands]
        constants = [term for term in terms if term.opcode == "constant"]
        if len(constants) != 1:
            return 0
        total += int(constants[0].inside)
        value = next(term for term in terms if term is not constants[0])
    return total if _place(value) == index else 0


def array_bytes(shape: str) -> list[int]:
    """Bytes of each array of a shape as written, a tuple's one after the other, without the padding of layouts."""
    bits = [(8 if kind == "pred" else int(width or 0), dims) for kind, width, dims in ARRAY.findall(shape)]
    return [size * math.prod(int(n) for n in dims.split(",") if n) // 8 for size, dims in bits]


def parse(text: str) -> Module:
    """The computations of a module's text."""
    computations: dict[str, Computation] = {}
    for line in METADATA.sub(r"\1\2\3", text).splitlines():
        if line.startswith(("ENTRY", "%")) and line.rstrip().endswith("{"):
            name = line.removeprefix("ENTRY").strip().removeprefix("%").split(" ")[0]
            computations[name] = Computation(name, {})
        elif match := LINE.match(line):
            is_root, called, shape, opcode, rest = match.groups()
            end = _closing(rest)
            instruction = Instruction(called, shape, opcode, rest[:end], rest[end + 1 :], bool(is_root))
            computations[name].instructions[called] = instruction
    return Module(computations)


def _closing(rest: str) -> int:
    """Where the parenthesis closes that was opened before `rest`."""
    depth = 1
    for index in re.finditer(r"[()]", rest):
        depth += 1 if index[0] == "(" else -1
        if depth == 0:
            return index.start()
    raise ValueError(f"an instruction without an end: {rest[:80]}")
