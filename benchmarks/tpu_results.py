"""The sections of RESULTS.md on TPU steps: explicit and GSPMD, MaxText, several slices, collective matmul."""

import re

from result_format import (
    exposed,
    format_commands,
    format_kinds,
    gib_per_device,
    markdown_table,
    percent,
    read_rows,
    seconds,
)

PROGRAMS = {"explicit": "", "gspmd": ", GSPMD baseline", "pytorch": ", PyTorch baseline"}
"""`program` of a row -> what is appended to the model's name."""

MAXTEXT_SECONDS = {
    ("16b", "TPU v5 lite"): 11.19,
    ("32b", "TPU v5 lite"): 15.48,
    ("64b", "TPU v5 lite"): 15.17,
    ("128b", "TPU v5 lite"): 19.62,
    ("6b", "TPU v3"): 2.22,
    ("6b", "TPU v4"): 2.49,
    ("6b", "TPU v5 lite"): 1.26,
}
"""Step time of MaxText for (model, device kind), for as many chips and tokens, predicted by an earlier version of the
schedule simulator."""

MAXTEXT_NOTES = """
MaxText for equal work: the same chips, model, tokens per step and optimizer.  The MaxText step was compiled by the same
libtpu, and its schedule was simulated by an earlier version of the simulator with the same kind of link model.

`mesh.fsdp_gradients=ring` is not always faster.  It overlaps the reduction of the gradients only if there is memory to
spare, and its matmuls, split into up to 16 chunks, take longer.

Activations named by `model.offload` are offloaded to host memory ("host" in the GiB column).  The assumed bandwidth is
16 GB/s per chip (scaling book), and copies run in the order in which they start; a VM of four v5e chips has 192 GB of
memory.  Everything that remat `all_matmuls` saves would be 48 GiB per chip for 32B, 64B and 128B, and 69 for 16B.  A
write that would overwrite an array of the previous layer waits until the write of that layer has finished; XLA decides
in which order the copies start.  In the explicit step q, k and v are copied at the end of a block, so that there is
almost no waiting; the GSPMD baselines wait for up to a fifth of their step.
While the explicit steps of 2.8B to 128B were compiled, other programs used both cores, which takes two to four times as
long as alone; the baselines of 16B to 128B were compiled one at a time.

Offload with gradient rings had a scan over the layers of its own, written by hand, which is gone
(docs/performance-notes.md).  The steps of 6B on v4 and of 16B to 128B on v5e were compiled again without it, and take
1.8 to 4.1 % longer.  The calibration above is that of the steps with it.

A step's update is computed twice, to judge it before it is taken.  The baselines were compiled before it was.  Compiled
again since, 16B by collective matmul on 64 v4 and 20B on 64 v5p take the same time to 0.03 %.  The judgement costs most
where a step has few tokens per parameter: 6B on the v5e-16 took 0.668 s before it.
"""

SCALING_NOTES = """
Weak scaling over slices that communicate over the data-centre network (`mesh.slices`).
"""

PRETRAINED_NOTES = """
The shapes are those of the published config.json files (`benchmarks/pretrained`), which is all that a plan needs.
Master weights, gradients and AdamW's state in float32 take 16 bytes a parameter: Llama 3.1 70B fits none of the small
slices.  With adapters the base is held in bfloat16.  Rows are packed, so that all tokens are those of documents.
"""

COLLECTIVE_MATMUL_NOTES = """
A collective matmul overlaps its communication fully if the matmul has enough features per device: about 3055 on a v4,
2550 on a v5p, 2190 on a v5e, 5100 on a v6e (`shmap_tp/parallel/collective_matmul.py`).  16B on (4, 16) has 2304 at the
end of its parallel block; with attention before the MLP it has 3072 at the start of attention and 1024 at its end on
(8, 8), and half as many on (4, 16).  Most of the exposed communication of 60B on a v6e is that of dp.  Two steps were
compiled at a time; explicit steps that then took more than 180 s were compiled once more alone.
"""


def step_table(title: str, rows: list[dict]) -> str:
    """A heading, the commands, and one line per step."""
    lines = [
        [
            row["model"] + PROGRAMS[row["program"]],
            f"{row['chips']} x {row['device_kind']}" + (f" x {row['slices']} slices" if row["slices"] > 1 else ""),
            f"({row['dp']}, {row['mp']}) on {'x'.join(map(str, row['tile'] or []))}",
            f"{row['tokens_per_step']:,} / {row['microbatches']}",
            _settings(row),
            seconds(row["step_seconds"]),
            f"{row['tokens_per_second_per_chip']:,.0f}" if row["tokens_per_second_per_chip"] else "-",
            f"{percent(row['mfu'])} / {percent(row['hfu'])}",
            exposed(row),
            gib_per_device(row),
            f"{row['compile_seconds']:.0f}",
        ]
        for row in rows
    ]
    columns = ["model", "chips", "(dp, mp) on tile (x, y, z, core)", "tokens per step / microbatches"]
    columns += ["block, tensor parallelism, ZeRO, remat, attention", "step s", "tokens/s per chip", "MFU / HFU"]
    columns += ["exposed communication", "GiB per device", "compile s"]
    return f"## {title}, {format_kinds(rows)}\n\n{format_commands(rows)}\n\n{markdown_table(columns, lines)}\n"


def _settings(row: dict) -> str:
    zero = row["zero"]
    if row.get("fsdp_gradients", "reduce_scatter") != "reduce_scatter":
        zero += f", FSDP gradients {row['fsdp_gradients']}"
    remat = row["remat"] + (f", offload {' + '.join(row['offload'])}" if row.get("offload") else "")
    remat += ", row-major" if row.get("row_major") else ""
    settings = f"{row['block']}, {row['tensor_parallel']}, {zero}, {remat}, {row['attention']}"
    return f"{settings}{_adapter(row)}{_compiler_options(row)}"


def _adapter(row: dict) -> str:
    rank = re.search(r"model\.adapter\.rank=(\d+)", row["command"])
    return f", adapter of rank {rank[1]}" if rank else ""


def _compiler_options(row: dict) -> str:
    """The XLA options given on the command line."""
    options = re.findall(r"run\.compiler_options\.(\w+)=(\w+)", row["command"])
    return "".join(f", {name}={value}" for name, value in options)


def tpu_steps() -> str:
    rows = read_rows("tpu")
    return step_table("Steps on TPU slices", rows) + _maxtext_comparison(rows) + _weak_scaling(rows)


def pretrained_steps() -> str:
    rows = read_rows("pretrained")
    return step_table("Training pretrained models on", rows) + PRETRAINED_NOTES if rows else ""


def collective_matmul_steps() -> str:
    title = "Exposed communication of collective matmul, 2048 tokens per device and microbatch"
    return step_table(title, read_rows("ring")) + COLLECTIVE_MATMUL_NOTES


def _maxtext_comparison(rows: list[dict]) -> str:
    """Our fastest program for each model and chip, beside MaxText's."""
    fastest: dict[tuple[str, str], dict] = {}
    for row in rows:
        key = row["model"], row["device_kind"]
        if key in MAXTEXT_SECONDS and row["step_seconds"] and row["program"] == "explicit" and row["slices"] == 1:
            fastest[key] = min(row, fastest.get(key, row), key=lambda row: row["step_seconds"])
    lines = [
        [
            row["model"],
            f"{row['chips']} x {row['device_kind']}",
            f"({row['dp']}, {row['mp']})",
            seconds(row["step_seconds"]),
            seconds(MAXTEXT_SECONDS[key]),
            f"**{row['step_seconds'] / MAXTEXT_SECONDS[key]:.2f}**",
            percent(row["mfu"]),
            exposed(row),
        ]
        for key, row in fastest.items()
    ]
    columns = ["model", "chips", "(dp, mp)", "step s", "MaxText step s", "ratio", "MFU", "exposed communication"]
    return f"{MAXTEXT_NOTES}\n{markdown_table(columns, lines)}\n"


def _weak_scaling(rows: list[dict]) -> str:
    """Rows on several slices beside the same step on one slice with as many tokens per chip."""
    lines = []
    for row in (row for row in rows if row["slices"] > 1 and row["step_seconds"]):
        single = [one for one in rows if one["slices"] == 1 and _same_step(one, row)]
        rate = row["tokens_per_second_per_chip"]
        slices = f"{row['slices']} x {row['topology']} {row['device_kind']}"
        lines += [
            [row["model"], slices, f"{rate:,.0f}", percent(rate / one["tokens_per_second_per_chip"])]
            for one in single[-1:]
        ]
    if not lines:
        return ""
    columns = ["model", "slices", "tokens/s per chip", "relative to one slice"]
    return f"{SCALING_NOTES}\n{markdown_table(columns, lines)}\n"


def _same_step(one: dict, other: dict) -> bool:
    same = ["model", "device_kind", "mp", "remat", "tensor_parallel", "zero", "microbatches", "program"]
    return (
        one["tokens_per_step"] / one["chips"] == other["tokens_per_step"] / other["chips"]
        and one.get("fsdp_gradients", "reduce_scatter") == other.get("fsdp_gradients", "reduce_scatter")
        and one.get("offload", []) == other.get("offload", [])
        and _compiler_options(one) == _compiler_options(other)
        and all(one[name] == other[name] for name in same)
    )
