"""Parse the text of a compiled module: its computations, and how often each of them runs per run of the module.

`compiled.as_text()` of XLA for CPU, GPU or TPU.  A computation is a list of instructions, one per line:

    %name = f32[4,8]{1,0:T(8,128)} opcode(%operand, %operand), attribute=..., calls=%computation, backend_config={...}

XLA for CPU states the trip count of a loop.  XLA for TPU does not; there it is derived from the loop counter: its
initial value, the increment in the loop body, and the limit in the condition.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

ARRAY = re.compile(r"\b(pred|token|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")

LINE = re.compile(r"\s+(ROOT )?%?(\S+) = (.*?) ([a-z][\w\-]*)\((.*)$")

CALLED = re.compile(r"\b(calls|to_apply|body|condition|called_computations|[a-z]+_computations?)=(\{[^}]*\}|%[^\s,)]+)")

METADATA = re.compile(r"(kernel_metadata=\{)\n\s*([^\n]*)\n\s*(\}\})")
"""The metadata of a Pallas kernel, the only part of an instruction that is printed over several lines."""

KERNEL = "tpu_custom_call"
GPU_LIBRARIES = ("__cublas", "__cudnn")
"""Prefixes of the calls of a library in a module for GPUs; their times are in gpu.py."""

BRANCHES = {"branch_computations", "true_computation", "false_computation"}

ENDS_OF_ASYNC = ("-done", "-update")
"""Suffixes of the instructions that name the computation which the matching -start already runs."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of a computation, as text."""

    name: str
    shape: str
    """As printed: f32[4,8]{1,0}, or a tuple of such shapes."""
    opcode: str
    arguments: str
    """The text between the parentheses: operands, or the value of a constant."""
    attributes: str
    """The rest of the line."""
    is_root: bool

    @cached_property
    def estimated_cycles(self) -> int | None:
        """The estimate of XLA for TPU, where it makes one."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([^\s,)]+)", self.arguments)

    @property
    def called(self) -> list[tuple[str, str]]:
        """(attribute, name of the computation that it refers to)."""
        found = CALLED.findall(self.attributes)
        return [(attribute, name) for attribute, names in found for name in re.findall(r"%([^\s,{}]+)", names)]

    @property
    def tuple_index(self) -> int | None:
        """The tuple element that a get-tuple-element selects; None for any other instruction."""
        index = re.search(r"\bindex=(\d+)", self.attributes)
        return int(index[1]) if self.opcode == "get-tuple-element" and index else None


@dataclass(frozen=True)
class Computation:
    """A named list of instructions."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions.values() if instruction.is_root)

    def without_copies(self, name: str) -> Instruction:
        """The instruction that computes the value `name`, looking through copies and bitcasts."""
        instruction = self.instructions[name]
        while instruction.opcode in ("copy", "bitcast"):
            instruction = self.instructions[instruction.operands[0]]
        return instruction


@dataclass(frozen=True)
class Module:
    """A compiled module."""

    computations: dict[str, Computation]
    """Computations in the order of the text: callees before callers, the entry computation last."""

    @property
    def entry(self) -> Computation:
        return list(self.computations.values())[-1]

    @cached_property
    def runs(self) -> dict[str, float]:
        """How often each computation runs per run of the module; NaN where that is unknown, as in a branch."""
        found = dict.fromkeys(self.computations, 0.0)
        for number, computation in enumerate(reversed(self.computations.values())):
            found[computation.name] += number == 0
            for instruction in computation.instructions.values():
                if not instruction.opcode.endswith(ENDS_OF_ASYNC):
                    for attribute, name in instruction.called:
                        found[name] += found[computation.name] * self._calls(computation, instruction, attribute)
        return found

    def _calls(self, computation: Computation, instruction: Instruction, attribute: str) -> float:
        if attribute in BRANCHES:
            return math.nan
        return self.trip_count(computation, instruction) if instruction.opcode == "while" else 1.0

    def trip_count(self, computation: Computation, loop: Instruction) -> float:
        """How often the body of a while loop runs; NaN where it cannot be determined."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
        if known:
            return float(known[1])
        condition, body = (self.computations[dict(loop.called)[role]] for role in ("condition", "body"))
        test = condition.root
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return math.nan
        counter, limit = (condition.without_copies(operand) for operand in test.operands)
        index = counter.tuple_index
        initial, result = computation.without_copies(loop.operands[0]), body.root
        if index is None or limit.opcode != "constant" or {initial.opcode, result.opcode} != {"tuple"}:
            return math.nan
        start = computation.without_copies(initial.operands[index])
        step = _increment(body, body.without_copies(result.operands[index]), index)
        if start.opcode != "constant" or step <= 0:
            return math.nan
        return float(max(0, math.ceil((int(limit.arguments) - int(start.arguments)) / step)))


def _increment(body: Computation, value: Instruction, index: int) -> int:
    """The constant that `value` adds to element `index` of the loop state; 0 if it is no such sum."""
    total = 0
    while value.opcode == "add":
        terms = [body.without_copies(operand) for operand in value.operands]
        constants = [term for term in terms if term.opcode == "constant"]
        if len(constants) != 1:
            return 0
        total += int(constants[0].arguments)
        value = next(term for term in terms if term is not constants[0])
    return total if value.tuple_index == index else 0


def array_bytes(shape: str) -> list[int]:
    """Bytes of each array of a printed shape (of each element of a tuple), without the padding of layouts."""
    bits = [(8 if kind == "pred" else int(width or 0), dims) for kind, width, dims in ARRAY.findall(shape)]
    return [size * math.prod(int(n) for n in dims.split(",") if n) // 8 for size, dims in bits]


def bytes_accessed(instruction: Instruction, computation: Computation) -> float:
    """Bytes read and written.  A gather or slice reads what it returns.  An update or scatter changes the operand that
    has the size of its result in place, and accesses twice what its other operands have."""
    word, results = f"{instruction.opcode} {instruction.name}", array_bytes(instruction.shape)
    operands = [sum(array_bytes(computation.instructions[name].shape)) for name in instruction.operands]
    if "update" in word or "scatter" in word:
        changed = (Counter(operands) & Counter(results)).elements()
        if total := sum(changed):
            return 2.0 * (sum(operands) - total) + sum(results) - total
    elif "gather" in word or "slice" in word:
        return 2.0 * sum(results)
    return float(sum(operands) + sum(results))


def parse_hlo(text: str) -> Module:
    """Parse the text of a compiled module."""
    computations: dict[str, Computation] = {}
    for line in METADATA.sub(r"\1\2\3", text).splitlines():
        if line.startswith(("ENTRY", "%")) and line.rstrip().endswith("{"):
            name = line.removeprefix("ENTRY").strip().removeprefix("%").split(" ")[0]
            computations[name] = Computation(name, {})
        elif match := LINE.match(line):
            is_root, result, shape, opcode, rest = match.groups()
            end = _closing_parenthesis(rest)
            instruction = Instruction(result, shape, opcode, rest[:end], rest[end + 1 :], bool(is_root))
            computations[name].instructions[result] = instruction
    return Module(computations)


def _closing_parenthesis(rest: str) -> int:
    """Index of the parenthesis that closes the one opened just before `rest`."""
    depth = 1
    for index in re.finditer(r"[()]", rest):
        depth += 1 if index[0] == "(" else -1
        if depth == 0:
            return index.start()
    raise ValueError(f"an instruction with an unclosed parenthesis: {rest[:80]}")
