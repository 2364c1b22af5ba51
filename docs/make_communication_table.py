"""Writes the communication table of docs/parallelism.md, from what the planner's search traces and its rules.

python docs/make_communication_table.py            rewrites the part between the markers
python docs/make_communication_table.py --check    exit code 1 if it is not current

tests/plan/test_communication.py checks that both are what a step does.
"""

import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

from generated_part import DOCS, GeneratedPart

from shmap_tp.config.choices import Block, FsdpGradients, Remat, TensorParallelMode, Zero
from shmap_tp.config.compose import CONF, load
from shmap_tp.config.schema import Config
from shmap_tp.parallel.mesh import axis_sizes
from shmap_tp.plan.ledger import Direction, Entry, Operation
from shmap_tp.plan.search.collective_seconds import activation_entries, local_parameters, placement_communication

DP_SIZE, MP_SIZE = 8, 3
TIME, WIDTH, FFN = 33, 16, 24
"""T and D, for one sequence on a device, and the MLP's width, which is also the vocabulary."""
WEIGHT = "blocks.mlp.up"
"""The weight whose data-parallel communication the table shows."""


SIZES = {
    "heads": MP_SIZE,
    "kv_heads": MP_SIZE,
    "ffn": FFN,
    "width": WIDTH,
    "layers": 1,
    "context": TIME,
    "vocabulary": FFN,
    "vocabulary_multiple": FFN,
}


@cache
def composed() -> Config:
    given = ["model=test", *(f"model.{key}={value}" for key, value in SIZES.items())]
    given += ["train.batch=8", "train.microbatches=1", f"mesh.dp={DP_SIZE}", "mesh.mp=1"]
    return load(str(CONF / "base.yaml"), given)


def config(*, mesh: dict[str, Any] | None = None, model: dict[str, Any] | None = None) -> Config:
    """The configuration with these values of its sections `mesh` and `model`."""
    base = composed()
    return replace(base, mesh=replace(base.mesh, **mesh or {}), model=replace(base.model, **model or {}))


def activations(entries: list[Entry]) -> list[str]:
    """Cells: forward, recomputed, backward.  Sizes are fractions of x[B T D], bfloat16."""
    x = 2 * TIME * WIDTH
    names = {x: "B T D", x // MP_SIZE: "B T/mp D", 4 * WIDTH: "D"}
    return [
        cell(entries, direction, names) for direction in (Direction.forward, Direction.recompute, Direction.backward)
    ]


def cell(entries: list[Entry], direction: Direction, names: dict[int, str]) -> str:
    totals: Counter[tuple[Operation, int]] = Counter()
    for entry in entries:
        if entry.direction == direction:
            totals[entry.operation, entry.bytes] += entry.count
    return (
        ", ".join(f"{times(operation, count)} of {names[size]}" for (operation, size), count in totals.items()) or "-"
    )


def times(operation: Operation, count: int) -> str:
    """Counts of ppermutes are multiples of the ring's size less one."""
    if operation != Operation.ppermute:
        return f"{count} {operation}{'s' if count > 1 else ''}"
    per_ring = MP_SIZE - 1
    rings = count // per_ring
    assert rings * per_ring == count, count
    return f"{rings} (mp - 1) {operation}s" if rings > 1 else f"mp - 1 {operation}s"


BLOCK_NAMES = {
    Block.parallel: "parallel block",
    Block.sequential: "sequential block",
    Block.parallel_two_norms: "parallel block with two norms",
}


def tensor_parallel_rows() -> list[list[str]]:
    rows = []
    for mode in TensorParallelMode:
        rows.append([f"**`tensor_parallel: {mode}`**", "", "", ""])
        rows.append(["embedding", *activations(communicated(mode, Block.parallel, Remat.none)["embedding"])])
        for block in Block:
            by_cells: dict[tuple[str, ...], list[str]] = {}
            for remat in Remat:
                cells = activations(communicated(mode, block, remat)["block"])
                by_cells.setdefault(tuple(cells), []).append(remat)
            for cells, policies in by_cells.items():
                rows.append([f"{BLOCK_NAMES[block]}, {named(policies)}", *cells])
        rows.append(["head", *activations(communicated(mode, Block.parallel, Remat.none)["head"])])
    return rows


def communicated(mode: TensorParallelMode, block: Block, remat: Remat) -> dict[str, list[Entry]]:
    """What the embedding, a block and the head communicate over mp."""
    chosen = config(mesh={"tensor_parallel": mode, "mp": MP_SIZE}, model={"block": block, "remat": remat})
    parts: dict[str, list[Entry]] = {"embedding": [], "block": [], "head": []}
    for entry in activation_entries(chosen):
        parts[entry.what if entry.what in parts else "block"].append(entry)
    return parts


def named(policies: list[str]) -> str:
    if len(policies) == len(Remat):
        return "any `remat`"
    if len(policies) == len(Remat) - 1 and Remat.none not in policies:
        return "any `remat` but `none`"
    return "`remat` " + ", ".join(f"`{policy}`" for policy in policies)


DATA_PARALLEL = {
    "`zero: none`": {},
    "`zero: zero1`": {"zero": Zero.zero1},
    "`zero: fsdp`": {"zero": Zero.fsdp},
    "`zero: fsdp`, `fsdp_gradients: ring`": {"zero": Zero.fsdp, "fsdp_gradients": FsdpGradients.ring},
    "`zero: zero1`, `slices: 2`": {"zero": Zero.zero1, "slices": 2},
    "`zero: fsdp`, `slices: 2`": {"zero": Zero.fsdp, "slices": 2},
}


def data_parallel_rows() -> list[list[str]]:
    rows = []
    for name, mesh in DATA_PARALLEL.items():
        chosen = config(mesh=mesh)
        weight = next(one for one in local_parameters(chosen.model, chosen.mesh, "bfloat16") if one.name == WEIGHT)
        own = placement_communication(weight, axis_sizes(chosen.mesh), 1, "bfloat16", ())
        forward = [entry for entry in own if entry.direction == Direction.forward]
        backward = [entry for entry in own if entry.direction in (Direction.recompute, Direction.backward)]
        once = [entry for entry in own if entry.direction == Direction.once]
        rows.append([name, *(in_words(part) for part in (forward, backward, once))])
    return rows


def in_words(entries: list[Entry]) -> str:
    """Sizes are fractions of one weight w."""
    found = []
    for entry in entries:
        itemsize = {"bfloat16": 2, "float32": 4}[entry.dtype]
        part = FFN * WIDTH * itemsize // entry.bytes
        size = {1: "w", DP_SIZE: "w/dp", DP_SIZE // 2: "w slices/dp", 2: "w/slices"}[part]
        count = f"{entry.count} " if entry.operation != Operation.ppermute else "dp - 1 "
        plural = "s" if entry.operation == Operation.ppermute else ""
        found.append(f"{count}{entry.operation}{plural} of {size} over `{entry.axis}`, {entry.dtype}")
    return "; ".join(found) or "-"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


OVER_MP = """Over mp, per microbatch.  B sequences of the microbatch on a device, T time, D model width; *recomputed*:
repeated in the backward pass by the rematerialisation policy."""
BESIDE = """In every mode the cross entropy adds one all-gather over mp of three values per position for each chunk of
positions; logits are never gathered.  With `all_reduce` the weight gradients of key and value are all-reduced over mp
where mp exceeds the number of key/value heads; in the other modes the gradients of all parameters that are replicated
over mp (norms, learned positions, such key and value weights) are all-reduced over mp once per step."""
OVER_DP = """Over the token axes, for one weight w of a block (w is what a device of mp holds of it).  Forward and
backward are per microbatch, the last column once per step.  In sizes dp is `mesh.dp`; `dp` and `dp_slice` are axes as
the ledger names them.  Gradients of vectors are all-reduced over all token axes, whatever `zero` says."""


def table() -> str:
    over_mp = markdown(["over mp", "forward", "recomputed", "backward"], tensor_parallel_rows())
    over_dp = markdown(["over token axes", "forward", "backward", "once per step"], data_parallel_rows())
    return "\n\n".join([OVER_MP, over_mp, BESIDE, OVER_DP, over_dp])


PART = GeneratedPart(
    document=DOCS / "parallelism.md",
    begin="<!-- communication table: generated -->",
    end="<!-- end of the communication table -->",
    text=table,
)

if __name__ == "__main__":
    sys.exit(PART.main(__doc__))
