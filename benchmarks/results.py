"""Write RESULTS.md from the JSON in results/: tables only say what a file says, each with the command that made it.

    python benchmarks/results.py

results/published.jsonl   published.py            results/cpu.jsonl         benchmark_cpu.py --json
results/tpu.jsonl         benchmark_tpu.py --json results/gpu.jsonl         benchmark_gpu.py --json
results/ring.jsonl        benchmark_tpu.py --json results/observed.jsonl    written by hand: what, value, command
results/layerwise.jsonl   layerwise.py --json
"""

import json
import math
import re
from pathlib import Path

HERE = Path(__file__).parent
GIB = 2**30
HEAD = """# Results

Made from `results/*.jsonl` by `python benchmarks/results.py`; not edited by hand.  *Measured*: on the devices named.
*Emulated*: run for real on CPU devices that JAX emulates; it says nothing about other hardware.  *Predicted*: the
training step compiled for the slice by its own compiler (libtpu) on a CPU machine, its schedule replayed with the
compiler's estimate of cycles and the link model of `shmap_tp/plan/links.py`.  MFU counts causal attention at half and
nothing that is recomputed; the peaks are those of `shmap_tp/hardware.py` (v3: 123 TFLOP/s a chip).
"""


PROGRAMS = {"explicit": "", "gspmd": ", gspmd twin", "pytorch": ", in PyTorch"}


def rows(name: str) -> list[dict]:
    file = HERE / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(columns: list[str], lines: list[list[str]]) -> str:
    cut = ["---"] * len(columns)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [columns, cut, *lines])


def commands(found: list[dict]) -> str:
    return "```sh\n" + "\n".join(dict.fromkeys(row["command"] for row in found)) + "\n```"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:#.3g}".rstrip(".")


def memory(row: dict) -> str:
    needs = "-" if row["peak_bytes_per_device"] is None else f"{row['peak_bytes_per_device'] / GIB:.2f}"
    has = "" if row["limit_bytes_per_device"] is None else f" of {row['limit_bytes_per_device'] / GIB:.2f}"
    host = f", host {row['host_bytes_per_device'] / GIB:.1f}" if row.get("host_bytes_per_device") else ""
    return f"{needs}{has}{host}" + ("" if row["fits"] else ", **does not fit**")


def published() -> str:
    found = rows("published")
    lines = []
    for row in found:
        known = row["published"]
        is_mfu = known["figure"] == "mfu"
        figure = percent(known["value"]) if is_mfu else f"{known['value']:,.0f} tokens/s"
        if known["as_counted_here"] != known["value"]:
            figure += f", here {percent(known['as_counted_here'])}"
        ours = percent(row["mfu"]) if is_mfu else f"{row['tokens_per_second'] or 0:,.0f} tokens/s"
        exposed = row["exposed_comm_seconds"] / row["step_seconds"] if row["step_seconds"] else None
        lines.append(
            [
                known["name"],
                figure + (f" ({known['note']})" if known["note"] else ""),
                ours if row["fits"] else "-",
                f"**{known['ratio']:.2f}**" if known["ratio"] else "-",
                f"({row['dp']}, {row['mp']})",
                percent(exposed),
                memory(row),
                f"{row['compile_seconds']:.0f}",
            ]
        )
    ratios = [row["published"]["ratio"] for row in found if row["published"]["ratio"]]
    middle = math.exp(sum(map(math.log, ratios)) / len(ratios))
    columns = ["system and slice", "published", "predicted, ours", "ratio", "(dp, mp)", "exposed wires", "GiB a device"]
    return f"""## Calibration: what others published, and what is predicted for our step

{commands(found)}

{table([*columns, "compile s"], lines)}

Ratios: {min(ratios):.2f} to {max(ratios):.2f}, geometric mean {middle:.2f}.  A ratio is the programs'
difference and the model's error together; only the rows of transformer_shmap, mesh-transformer-jax and MaxText on v5p
with mp 4 and 8, which share each layer between the devices as ours does, come near to saying what the error alone is.
A published MFU that counts attention whole is compared with what it is "here", counted at half.  Where dp shares all
weights, (n, 1), the published run shared them over its devices, too, if not always on that mesh.  Of MaxText's runs
over 2 to 32 slices those of 16B over up to 16 were compiled, and that of 32B over 8; PaLM's was not.  Over 32 ours does
not fit: what 8192 parts of dp do not divide, here an MLP's weights, each keeps whole.

T5X's placements: (4,2,2,1), which closes to a ring along x, is ahead as it was measured; the other two a torus cannot
tell apart, y and z being both 8, though they were measured 5 % apart.
"""


def _shared(row: dict) -> str:
    return row["zero"] + (
        f", gradients {row['gradients']}" if row.get("fsdp_gradients", "reduce_scatter") != "reduce_scatter" else ""
    )


def _kept(row: dict) -> str:
    return row["remat"] + (f", offload {' + '.join(row['offload'])}" if row.get("offload") else "")


def _given(row: dict) -> str:
    """The options of XLA that its command gave it."""
    return "".join(
        f", {name}={value}" for name, value in re.findall(r"run\.compiler_options\.(\w+)=(\w+)", row["command"])
    )


def steps(title: str, found: list[dict]) -> str:
    """A heading, the commands, and a row for each step."""
    lines = [
        [
            row["model"] + PROGRAMS[row["program"]],
            f"{row['chips']} x {row['device_kind']}" + (f" x {row['slices']} slices" if row["slices"] > 1 else ""),
            f"({row['dp']}, {row['mp']}) on {'x'.join(map(str, row['tile'] or []))}",
            f"{row['tokens_per_step']:,} / {row['microbatches']}",
            f"{row['block']}, {row['tensor_parallel']}, {_shared(row)}, {_kept(row)}, {row['attention']}{_given(row)}",
            seconds(row["step_seconds"]),
            f"{row['tokens_per_second_per_chip']:,.0f}" if row["tokens_per_second_per_chip"] else "-",
            f"{percent(row['mfu'])} / {percent(row['hfu'])}",
            percent(row["exposed_comm_seconds"] / row["step_seconds"]) if row["step_seconds"] else "-",
            memory(row),
            f"{row['compile_seconds']:.0f}",
        ]
        for row in found
    ]
    columns = ["model", "chips", "mesh", "tokens a step / microbatches"]
    columns += ["block, wire, zero, remat, attention", "step s"]
    columns += ["tokens/s a chip", "MFU / HFU", "exposed wires", "GiB a device", "compile s"]
    return f"## {title}, {kinds(found)}\n\n{commands(found)}\n\n{table(columns, lines)}\n"


def predicted() -> str:
    found = rows("tpu")
    return steps("Steps on TPU slices", found) + baseline(found) + scaling(found)


MAXTEXT = {
    ("16b", "TPU v5 lite"): 11.19,
    ("32b", "TPU v5 lite"): 15.48,
    ("64b", "TPU v5 lite"): 15.17,
    ("128b", "TPU v5 lite"): 19.62,
    ("gptj_6b", "TPU v3"): 2.22,
    ("gptj_6b", "TPU v4"): 2.49,
    ("gptj_6b", "TPU v5 lite"): 1.26,
}
"""Seconds of MaxText's step for the shape, on as many chips and tokens, by an earlier replay, not this one."""


def baseline(found: list[dict]) -> str:
    """Our fastest program of each shape and chip beside MaxText's."""
    best: dict[tuple[str, str], dict] = {}
    for row in found:
        key = row["model"], row["device_kind"]
        if key in MAXTEXT and row["step_seconds"] and row["program"] == "explicit" and row["slices"] == 1:
            best[key] = min(row, best.get(key, row), key=lambda row: row["step_seconds"])
    lines = [
        [
            row["model"],
            f"{row['chips']} x {row['device_kind']}",
            f"({row['dp']}, {row['mp']})",
            seconds(row["step_seconds"]),
            seconds(MAXTEXT[key]),
            f"**{row['step_seconds'] / MAXTEXT[key]:.2f}**",
            percent(row["mfu"]),
            percent(row["exposed_comm_seconds"] / row["step_seconds"]),
        ]
        for key, row in best.items()
    ]
    columns = ["model", "chips", "(dp, mp)", "step s", "MaxText's s", "ratio", "MFU", "exposed wires"]
    return f"""
Equal work beside MaxText: the same chips, shape, tokens a step and optimizer.  MaxText's step was compiled by the same
libtpu and replayed by an earlier replay with the same kind of link model.

`mesh.fsdp_gradients=ring` is not always the faster.  It hides the reduction of the gradients only where there is memory to
spare, and its products, made in up to 16 pieces, take longer.

What `model.offload` keeps in the host's memory ("host" below GiB) goes there and back at 16 GB/s a chip, an assumption
of the scaling book's, and in the order in which it starts; a VM of four v5e chips has 192 GB.  All that remat `dots`
keeps would be 48 GiB a chip at 32B, 64B and 128B, 69 at 16B.  Where a write of the layer before still stands in that
queue, what would be written over it waits: in which order they start, XLA decides.  Our q, k and v go there from copies
that are made at the end of a block, so that nearly nothing waits (`shmap_tp/layers/later.py`); the twins' wait for up
to a fifth of their step.
Ours of 16B to 128B were compiled alone; the other large ones beside others, which can take more than twice as long.

{table(columns, lines)}
"""


SCALING = """
Weak scaling over slices, which meet over the network between hosts (`mesh.slices`).
"""


def scaling(found: list[dict]) -> str:
    """Rows of several slices beside the same step of one, with as many tokens a chip."""
    lines = []
    for row in (row for row in found if row["slices"] > 1 and row["step_seconds"]):
        alike = ["model", "device_kind", "mp", "remat", "tensor_parallel", "zero", "microbatches", "program"]
        share = row["tokens_per_step"] / row["chips"]
        ones = [
            one
            for one in found
            if one["slices"] == 1
            and one["tokens_per_step"] / one["chips"] == share
            and one.get("fsdp_gradients", "reduce_scatter") == row.get("fsdp_gradients", "reduce_scatter")
            and one.get("offload", []) == row.get("offload", [])
            and _given(one) == _given(row)
            and all(one[name] == row[name] for name in alike)
        ]
        rate = row["tokens_per_second_per_chip"]
        where = f"{row['slices']} x {row['topology']} {row['device_kind']}"
        lines += [
            [row["model"], where, f"{rate:,.0f}", percent(rate / one["tokens_per_second_per_chip"])]
            for one in ones[-1:]
        ]
    if not lines:
        return ""
    columns = ["model", "slices", "tokens/s a chip", "of one slice's"]
    return f"{SCALING}\n{table(columns, lines)}\n"


def kinds(found: list[dict]) -> str:
    return ", ".join(sorted({row["kind"] for row in found}))


RINGS = """
A ring hides where a region has enough features of a device, some 3055 of a v4, 2550 of a v5p, 2190 of a v5e, 5100 of a
v6e (`shmap_tp/ring.py`).  16B on (4, 16) leaves its parallel block with 2304; with attention before the MLP it enters
attention with 3072 and leaves it with 1024 on (8, 8), and with half of that on (4, 16).  What 60B on a v6e waits for
is dp's for the greater part.  Compiled two at a time; ours that took more than 180 s so, once more alone.
"""


def rings() -> str:
    found = rows("ring")
    return steps("What a ring leaves exposed, 2048 tokens a device and microbatch", found) + RINGS


def gpu() -> str:
    found = rows("gpu")
    if not found:
        return "## GPUs\n\nNone measured yet: no GPU was at hand.\n"
    lines = [
        [
            f"{row['devices']} x {row['device_kind']}",
            row["model"] + PROGRAMS[row["program"]],
            f"({row['dp']}, {row['mp']})",
            seconds(row["step_seconds"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{percent(row['mfu'])} / {percent(row['hfu'])}",
            memory(row),
        ]
        for row in found
    ]
    columns = ["devices", "model", "mesh", "step s", "tokens/s", "MFU / HFU", "GiB a device"]
    return f"## GPUs, {kinds(found)}\n\n{commands(found)}\n\n{table(columns, lines)}\n"


def cpu() -> str:
    found = rows("cpu")
    if not found:
        return ""
    lines = [
        [
            str(tuple(row["mesh"])),
            row["program"],
            f"{row['step_seconds']:.2f} ({' - '.join(f'{s:.2f}' for s in row['step_seconds_range'])})",
            f"{row['tokens_per_second']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['processor_ratio']:.2f}",
            f"{row['processor_seconds']:.2f}",
            f"{row['temporary_bytes'] / 2**20:.0f}",
            " / ".join(row["collectives"]),
            f"{row['compile_seconds']:.1f}",
        ]
        for row in found
    ]
    columns = ["mesh", "program", "step s, median (min - max)", "tokens/s", "ratio to matmul", "by processor time"]
    columns += ["processor s", "temporaries MiB", "collectives in loops / outside", "compile s"]
    seconds = {(row["program"], *row["mesh"]): row["step_seconds"] for row in found}
    meshes = [place for program, *place in seconds if program == "gspmd"]
    to_twin = ", ".join(
        f"{seconds['explicit', *place] / seconds['gspmd', *place]:.2f} on {tuple(place)}" for place in meshes
    )
    return f"""## A step on this CPU, against its own matrix products, emulated

{commands(found)}

4 devices on 2 cores; 33.6M parameters, context 256, batch 16, 2 microbatches, AdamW, float32.  The product of two
float32 matrices of 2048 cubed, timed between the steps, runs at {found[0]["matmul_rate"] / 1e9:.0f} GFLOP/s,
and the ratios are to it.  Explicit : gspmd, by medians: {to_twin}.

{table(columns, lines)}
"""


def layerwise() -> str:
    found = rows("layerwise")
    if not found:
        return ""
    columns = ["program", "passes", "where", "s", "wires s", "exposed s", "published s"]
    lines = [
        [
            row["program"],
            row["passes"],
            f"{row['devices']} x {row['device_kind']}, {row['kind']}",
            seconds(row["seconds"]),
            seconds(row["comm_seconds"]),
            seconds(row["exposed_comm_seconds"]),
            seconds(row.get("published_seconds")),
        ]
        for row in found
    ]
    return f"## Weights gathered layer by layer, {kinds(found)}\n\n{commands(found)}\n\n{table(columns, lines)}\n"


def observed() -> str:
    found = rows("observed")
    lines = [[row["what"], row["value"], row["kind"], f"`{row['command']}`"] for row in found]
    return "## What was seen\n\n" + table(["what", "value", "kind", "command"], lines) + "\n"


def text() -> str:
    """The whole of RESULTS.md."""
    parts = [HEAD, published(), predicted(), rings(), gpu(), layerwise(), cpu(), observed()]
    return "\n".join(part for part in parts if part)


if __name__ == "__main__":
    (HERE / "RESULTS.md").write_text(text())
