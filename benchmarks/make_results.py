"""Write RESULTS.md from the JSON in results/.  Every table lists the commands that produced its rows.

    python benchmarks/make_results.py

results/published.jsonl   calibration.py          results/cpu.jsonl         benchmark_cpu.py --json
results/tpu.jsonl         benchmark_tpu.py --json results/gpu.jsonl         benchmark_gpu.py --json
results/gpu_plan.jsonl benchmark_gpu.py --version
results/ring.jsonl        benchmark_tpu.py --json results/observed.jsonl    written by hand: what, value, command
results/fastest.jsonl     shmap_tp.plan step --json
results/layerwise.jsonl   benchmark_layerwise.py --json   results/pretrained.jsonl  plan --from-pretrained --json
results/searches.jsonl    from what the commands print    results/whole_space.jsonl whole_space.py
results/generation.jsonl  shmap_tp.plan decode --json    results/generation_cpu.jsonl benchmark_generate.py --json
"""

import math

from calibration import DIFFERS, TABLE, comparable, constant_without, constants
from fastest_results import fastest_steps
from generation_results import generation
from result_format import (
    HERE,
    exposed,
    format_commands,
    format_kinds,
    gib_per_device,
    markdown_table,
    percent,
    read_rows,
    seconds,
)
from search_results import searches
from tpu_results import PROGRAMS, collective_matmul_steps, pretrained_steps, tpu_steps

HEAD = """# Results

Generated from `results/*.jsonl` by `python benchmarks/make_results.py`; do not edit by hand.  *Measured*: on the named
devices.  *Emulated*: run on CPU devices that JAX emulates; says nothing about other hardware.  *Predicted*: the step
was compiled for the slice by its own compiler (libtpu) on a CPU machine, and its schedule was simulated with the
compiler's estimates of cycles and the link model of `shmap_tp/plan/tpu.py`.  MFU counts causal attention at half
and no recomputation; the peaks are those of `shmap_tp/hardware/devices.py` (v3: 123 TFLOP/s per chip).
"""


CONSTANTS = ["TPU version", "constant", "range", "runs", "best MFU published", "ours, predicted"]


def calibration() -> str:
    rows = read_rows("published")
    columns = ["system and slice", "published", "predicted for our step", "ratio", "(dp, mp)", "exposed communication"]
    columns += ["GiB per device", "compile s", "calibrated on the others"]
    ratios = [row["published"]["ratio"] for row in rows if row["published"]["ratio"]]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"""## Calibration: published measurements, and the prediction for our step

{format_commands(rows)}

{markdown_table(columns, [_calibration_line(row, rows) for row in rows])}

The last column multiplies the predicted step by the constant of the TPU version, fitted on the comparable runs of all
other models, and gives the difference from the published step.  No constant is fitted to these runs:

{_differences()}

{markdown_table(CONSTANTS, _constants(rows))}

The planner prints these constants and ranges with each prediction (`shmap_tp/plan/report.py`).

These steps were compiled before kernels brought heads to splash attention and rows of 8192 had larger blocks of keys
(commit ea84165; docs/performance-notes.d/layers.md).  The published programs have no such kernels, so that a constant
fitted to ours without them compares like with like, and these rows stay.  On v6e today's program is faster: the plain
step of Llama3.1-8B on 16 chips is predicted at 3.06 s with the kernels alone, in place of 3.11.

Ratios predicted : published range from {min(ratios):.2f} to {max(ratios):.2f}, geometric mean {mean:.2f}.  A ratio
includes both the difference between the programs and the error of the prediction.  Only the rows of transformer_shmap,
mesh-transformer-jax and MaxText on v5p with mp 4 and 8 come close to showing the error alone: these programs use tensor
parallelism as ours does.  A published MFU that counts attention in full is converted to attention at half before the
comparison ("converted").  On meshes (n, 1) our weights are sharded over dp (FSDP); the published run sharded them over
its devices as well, though not always on that mesh.  On 32 slices our step does not fit: weights that 8192 dp ranks
do not divide, here those of the MLP, are replicated.

Published, and not compiled yet (`python benchmarks/calibration.py --only NAME`):

{_not_compiled(rows)}

Two published steps are not the same work: Llama3.1-70B on v6e-32 keeps bfloat16 weights (17.79 s, 64 x 8192 tokens),
and with 131,072 tokens on 256 TPU7x chips (34.02 s, 64 sequences) attention is sharded over the sequence, too, which
ours cannot do.

T5X placements: (4,2,2,1), which closes to a ring along x, is predicted to be fastest, as measured.  The other two are
equivalent on a torus, where y and z are both 8, although their measurements differ by 5 %.
"""


def _not_compiled(rows: list[dict]) -> str:
    """Rows of the table of published runs that are not recorded, by system."""
    done, slices = {row["published"]["name"] for row in rows}, {}
    for name in (row.name for row in TABLE if row.name not in done):
        system, _, where = name.partition(", ")
        slices.setdefault(system, []).append(where)
    return "\n".join(f"- {system}: {', '.join(where)}" for system, where in slices.items())


def _differences() -> str:
    names: dict[str, list[str]] = {}
    for name, reason in DIFFERS.items():
        names.setdefault(reason, []).append(name)
    return "\n".join(f"- {'; '.join(same)}: {reason}." for reason, same in names.items())


def _constants(rows: list[dict]) -> list[list[str]]:
    lines = []
    for kind, one in constants(rows).items():
        same = [row for row in comparable(rows) if row["device_kind"] == kind]
        best = max(same, key=_published_mfu)
        ours = max(same, key=lambda row: row["mfu"])
        lines.append(
            [
                kind,
                f"{one.constant:.2f}",
                f"{one.lowest:.2f} to {one.highest:.2f}",
                str(one.runs),
                f"{percent(_published_mfu(best))} ({best['published']['name']})",
                f"{percent(ours['mfu'])} ({ours['model']})",
            ]
        )
    return lines


def _published_mfu(row: dict) -> float:
    """Attention counted at half; both steps do the same work."""
    return row["mfu"] / row["published"]["ratio"]


def _calibration_line(row: dict, rows: list[dict]) -> list[str]:
    published, others = row["published"], constant_without(row, rows)
    is_mfu = published["figure"] == "mfu"
    figure = percent(published["value"]) if is_mfu else f"{published['value']:,.0f} tokens/s"
    if published["as_counted_here"] != published["value"]:
        figure += f", converted {percent(published['as_counted_here'])}"
    ours = percent(row["mfu"]) if is_mfu else f"{row['tokens_per_second'] or 0:,.0f} tokens/s"
    return [
        published["name"],
        figure + (f" ({published['note']})" if published["note"] else ""),
        ours if row["fits"] else "-",
        f"**{published['ratio']:.2f}**" if published["ratio"] else "-",
        f"({row['dp']}, {row['mp']})",
        exposed(row),
        gib_per_device(row),
        f"{row['compile_seconds']:.0f}",
        f"{others / published['ratio'] - 1:+.0%}" if others and published["ratio"] else "-",
    ]


def gpu_steps() -> str:
    measured, planned = read_rows("gpu"), read_rows("gpu_plan")
    found = f"{format_commands(measured)}\n\n{_gpu_table(measured)}" if measured else "No step was measured yet."
    return f"""## GPUs

{found}

### Steps on GPUs that were not there, estimated

Compiled by XLA for GPU on a CPU machine: memory is the compiler's peak, without NCCL's buffers and CUDA's context, out
of JAX's default memory pool (75 % of the GPU's memory).  The collectives of 6b and llama3_8b on H100 and H200, three
meshes each, and of llama3_70b on (64, 1) were compared with the traced ones (`python -m shmap_tp.plan step` with the
same flags): the same bytes.  The time is an estimate by formulas that no GPU has confirmed (`shmap_tp/plan/gpu.py`).

Published beside them, none of the same step: Llama-3-70B on 64 H100, 731 TFLOP/s a GPU in FP8 (Megatron-Bridge), 37 %
of the FP8 peak of 1979, beside the {_bf16_rate(planned)} that (64, 1) is estimated to do in bfloat16; in bfloat16,
Megatron-LM reports 41 to 48 % MFU on 96 to 6144 H100.  Llama-3-8B: 744 TFLOP/s a GPU in FP8 on 8 H100
(Megatron-Bridge), and 25.6 to 28.2 % MFU in bfloat16 on 64 with tensor parallelism over 8 (torchtitan).  An estimate
above what Megatron-LM reaches is optimistic.

One command plans a step, measures it on the attached GPU, and compares time, memory and compiled programs; no GPU has
run it yet: `python benchmarks/benchmark_gpu.py --dp 1 --mp 1 --model gpt2 --batch 8 --compare-plan h100`.

{format_commands(planned)}

{_gpu_table(planned)}
"""


def _bf16_rate(planned: list[dict]) -> str:
    """Model TFLOP/s of a GPU and MFU of the estimated 70B step on 64 GPUs with FSDP."""
    row = next(row for row in planned if row["model"] == "llama3_70b" and row["dp"] == 64)
    return f"{row['tflops_per_chip']:.0f} TFLOP/s ({percent(row['mfu'])})"


def _gpu_table(rows: list[dict]) -> str:
    columns = ["devices", "model", "(dp, mp)", "tokens / microbatches", "step s", "tokens/s", "MFU / HFU"]
    columns += ["exposed communication", "GiB per device"]
    return markdown_table(columns, [_gpu_line(row) for row in rows])


def _gpu_line(row: dict) -> list[str]:
    speed = ["-"] * 4
    if row["step_seconds"]:
        utilisation = f"{percent(row['mfu'])} / {percent(row['hfu'])}"
        speed = [seconds(row["step_seconds"]), f"{row['tokens_per_second']:,.0f}", utilisation, exposed(row)]
    return [
        f"{row['devices']} x {row['device_kind']}",
        row["model"] + PROGRAMS[row["program"]],
        f"({row['dp']}, {row['mp']})",
        f"{row['tokens_per_step']:,} / {row['microbatches']}",
        *speed,
        gib_per_device(row),
    ]


def layerwise() -> str:
    rows = read_rows("layerwise")
    if not rows:
        return ""
    columns = ["program", "passes", "devices", "s", "communication s", "exposed s", "published s"]
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
        for row in rows
    ]
    title = f"## Layerwise FSDP matmuls, {format_kinds(rows)}"
    return f"{title}\n\n{format_commands(rows)}\n\n{markdown_table(columns, lines)}\n"


def cpu_steps() -> str:
    rows = read_rows("cpu")
    if not rows:
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
        for row in rows
    ]
    columns = ["(dp, mp)", "program", "step s, median (min - max)", "tokens/s", "ratio to matmul"]
    columns += ["ratio in processor time", "processor s", "temporaries MiB", "collectives in loops / outside"]
    columns += ["compile s"]
    times = {(row["program"], *row["mesh"]): row["step_seconds"] for row in rows}
    meshes = [mesh for program, *mesh in times if program == "gspmd"]
    ratios = ", ".join(f"{times['explicit', *mesh] / times['gspmd', *mesh]:.2f} on {tuple(mesh)}" for mesh in meshes)
    rate = f"{rows[0]['matmul_rate'] / 1e9:.0f} GFLOP/s"
    return f"""## A step on this CPU, relative to its matmul rate, emulated

{format_commands(rows)}

4 devices on 2 cores; 33.6M parameters, context 256, batch 16, 2 microbatches, AdamW, float32.  A float32 matmul of
2048 x 2048 matrices, timed between the steps, runs at {rate}; `ratio to matmul` is relative to it.
Ratios explicit : gspmd of the medians: {ratios}.

The judgement of the update, which XLA for CPU does not do in place, costs memory where a device updates everything: on
(4, 1) 640 instead of 576 MiB of temporaries.

{markdown_table(columns, lines)}
"""


def observations() -> str:
    rows = read_rows("observed")
    lines = [[row["what"], row["value"], row["kind"], f"`{row['command']}`"] for row in rows]
    return "## Other observations\n\n" + markdown_table(["what", "value", "kind", "command"], lines) + "\n"


def text() -> str:
    """The text of RESULTS.md."""
    sections = [
        HEAD,
        calibration(),
        fastest_steps(),
        tpu_steps(),
        pretrained_steps(),
        collective_matmul_steps(),
        gpu_steps(),
    ]
    sections += [searches(), generation(), layerwise(), cpu_steps()]
    return "\n".join(section for section in [*sections, observations()] if section)


if __name__ == "__main__":
    (HERE / "RESULTS.md").write_text(text())
