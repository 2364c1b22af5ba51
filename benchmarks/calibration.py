"""Calibration: published measurements on TPUs beside our step, predicted for the same slice, model and tokens.

    python benchmarks/calibration.py [--only v5e-256] [--json benchmarks/results/published.jsonl]

Our step does the same work as the published run and shards the weights the same way: over dp (FSDP), or over mp alone
with ZeRO-1.  The tensor-parallel mode, rematerialisation and offload are our choice.  A step that does not fit is
listed with the memory it needs.  `ratio` is predicted : published.  Rows that are already in the file are skipped.  MFU
counts causal attention at half; a published MFU that counts attention in full, as those of MaxText and PaLM do, is
converted first.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from shmap_tp.config.compose import CONF, load
from shmap_tp.config.schema import Config
from shmap_tp.hardware.devices import GENERATIONS
from shmap_tp.model.flops import flops_per_token
from shmap_tp.plan.flags import append_json
from shmap_tp.plan.predict import predict
from shmap_tp.plan.report import Calibration, format_row
from shmap_tp.plan.tpu import Slice
from shmap_tp.runtime.command_line import run_command

RESULTS = Path(__file__).parent / "results" / "published.jsonl"


@dataclass(frozen=True)
class Published:
    """A published measurement, and our settings for the same work."""

    name: str
    figure: str
    """mfu, or tokens_per_second."""
    value: float
    version: str
    sides: tuple[int, ...]
    mesh: tuple[int, int]
    model: str
    batch: int
    microbatches: int
    more: tuple[str, ...] = ()
    slices: int = 1
    note: str = ""
    full_attention: bool = False
    """Whether an MFU counts attention in full, not at half."""


FSDP = ("mesh.zero=fsdp", "mesh.fsdp_gradients=ring")
"""FSDP with the gradients reduced by a ring reduce-scatter."""

MAXTEXT = {
    # model: (published MFU on 1, 2, 4 ... slices, sequences per chip, microbatches, remat and offload)
    "16b": (
        [0.611, 0.594, 0.591, 0.583, 0.566, 0.547], 6, 2,
        ("model.remat=attention_and_up", "model.offload=[query_key_value,up]"),
    ),
    "32b": (
        [0.669, 0.648, 0.641, 0.637, 0.623, 0.604], 4, 2,
        ("model.remat=all_matmuls", "model.offload=[query_key_value,gate,up]"),
    ),
    "64b": (
        [0.599, 0.567, 0.559, 0.550, 0.533, 0.502], 2, 1,
        ("model.remat=attention_and_up", "model.offload=[sublayer_output,query_key_value,attention_output,up]"),
    ),
    "128b": (
        [0.561, 0.558, 0.549, 0.529, 0.509, 0.463], 1, 1,
        ("model.remat=attention_and_up", "model.offload=[input,sublayer_output,query_key_value,attention_output,up]"),
    ),
}  # fmt: skip
"""On v5e-256.  MFU and sequences per chip of all MaxText rows: github.com/AI-Hypercomputer/maxtext, MaxText/configs and
benchmarks/maxtext_trillium_model_configs.py."""


LLAMAS = {"Llama2-70B": ("llama2_70b", 4), "Llama3.1-8B": ("llama3_8b", 4), "Llama3.1-70B": ("llama3_70b", 5)}
"""(our model, sequences per chip).  The files changed over time and do not say which values were measured."""


def maxtext(model: str) -> list[Published]:
    """MaxText on one and more v5e-256 slices."""
    mfu, sequences, microbatches, remat = MAXTEXT[model]
    rows = []
    for i, value in enumerate(mfu):
        slices = 2**i
        dp, name = 256 * slices, f"MaxText {model}, v5e-256" + (f" x {slices}" if slices > 1 else "")
        work = (model, dp * sequences, microbatches, (*FSDP, *remat))
        rows.append(Published(name, "mfu", value, "v5e", (16, 16), (dp, 1), *work, slices=slices, full_attention=True))
    return rows


def t5x(tile: str, rate: float, batch: int, microbatches: int) -> Published:
    more = (f"mesh.tile=[{tile}]", "mesh.tensor_parallel=sequence", ALL_MATMULS)
    name = f"T5X 11B, v4-512, mp on ({tile}), batch {batch}"
    return Published(name, "tokens_per_second", rate, "v4", (4, 8, 8), (16, 16), "11b", batch, microbatches, more)


def maxtext_v5p(model: str, mfu: float, sequences: int, sides: tuple[int, ...], mp: int, remat: str) -> Published:
    """MaxText on a v5p: `sequences` per chip, tensor parallelism over mp and FSDP over the rest."""
    chips = math.prod(sides)
    more = ("mesh.zero=fsdp", "mesh.tensor_parallel=collective_matmul", remat)
    name, mesh = f"MaxText {model}, v5p-{2 * chips}", (chips // mp, mp)
    return Published(name, "mfu", mfu, "v5p", sides, mesh, model, sequences * chips, 1, more, full_attention=True)


def llama(
    name: str, where: str, mfu: float, version: str, sides: tuple[int, ...], microbatches: int, *remat: str
) -> Published:
    """MaxText with FSDP over all chips."""
    chips, (model, sequences) = math.prod(sides), LLAMAS[name]
    work, more = (model, sequences * chips, microbatches), ("mesh.zero=fsdp", *remat)
    return Published(
        f"MaxText {name}, {where}", "mfu", mfu, version, sides, (chips, 1), *work, more, full_attention=True
    )


def recipe(
    name: str, step_seconds: float, version: str, sides: tuple[int, ...], work: tuple[str, int, int], microbatches: int,
    *remat: str
) -> Published:  # fmt: skip
    """MaxText with FSDP over all devices, whose step time is published with its command (github.com/AI-Hypercomputer/
    tpu-recipes, training/trillium and training/ironwood).  `work` is (model, sequences, tokens of each)."""
    (model, sequences, length), devices = work, math.prod(sides) * GENERATIONS[version].cores
    rate, more = sequences * length / step_seconds, ("mesh.zero=fsdp", f"model.context={length}", *remat)
    mesh = (devices, 1)
    return Published(
        f"MaxText {name}", "tokens_per_second", rate, version, sides, mesh, model, sequences, microbatches, more
    )


ALL_MATMULS, ATTENTION_AND_UP, ATTENTION, FULL = [
    f"model.remat={policy}" for policy in ("all_matmuls", "attention_and_up", "attention", "full")
]

WIDE_13B = ("model.width=5120", "model.layers=40", "model.heads=40", "model.kv_heads=40", "model.head_dim=128")
WIDE_13B += ("model.ffn=20480", "model.name=13b")

PALM = ("model.name=palm_540b", "model.width=18432", "model.layers=118", "model.heads=48", "model.kv_heads=1")
PALM += (
    "model.head_dim=256",
    "model.ffn=73728",
    "model.mlp=swiglu",
    "model.positions=rotary",
    "model.tie_embeddings=true",
)
PALM += ("model.vocabulary=256000", "model.vocabulary_multiple=6144", "model.context=2048")
PALM += ("mesh.zero=fsdp", FULL)
"""Chowdhery et al. 2022, "PaLM", table 1, https://arxiv.org/abs/2204.02311"""

LEVANTER = ("mesh.zero=fsdp", ALL_MATMULS)

OURS_11B = "T5X 11B, v4-512, batch 5376, beside our search"

TABLE = [
    Published("transformer_shmap 2.83B, v2-32", "mfu", 0.63, "v2", (4, 4), (4, 8), "2_8b", 1024, 32),
    Published("transformer_shmap 6.86B, v3-32", "mfu", 0.44, "v3", (4, 4), (4, 8), "6_9b", 1024, 32),
    Published("mesh-transformer-jax 2.7B, v3-8", "mfu", 0.485, "v3", (2, 2), (1, 8), "2_8b", 64, 16, note="47-50 %"),
    Published("mesh-transformer-jax 10B, v3-8", "mfu", 0.485, "v3", (2, 2), (1, 8), "gpt2_10b", 16, 16),
    Published("Levanter 6.7B, v3-256", "mfu", 0.473, "v3", (8, 16), (256, 1), "6_9b", 1024, 1, LEVANTER),
    Published("Levanter 13B, v3-256", "mfu", 0.544, "v3", (8, 16), (256, 1), "6_9b", 1024, 2, (*WIDE_13B, *LEVANTER)),
    Published(
        "MaxText 22B, v4-128", "mfu", 0.567, "v4", (4, 4, 4), (64, 1), "26b", 832, 1, (*FSDP, FULL), full_attention=True
    ),
    *maxtext("16b"),
    *maxtext("32b"),
    *maxtext("64b"),
    *maxtext("128b"),
    maxtext_v5p("32b", 0.7147, 7, (4, 4, 4), 4, ATTENTION_AND_UP),
    maxtext_v5p("64b", 0.7031, 3, (4, 4, 4), 4, ATTENTION_AND_UP),
    maxtext_v5p("128b", 0.6868, 1, (4, 4, 8), 8, ALL_MATMULS),
    llama("Llama2-70B", "v5p-128", 0.654, "v5p", (4, 4, 4), 1, ATTENTION, "model.offload=[input,attention_output]"),
    llama("Llama3.1-8B", "v6e-256", 0.455, "v6e", (16, 16), 4, ATTENTION_AND_UP),
    llama("Llama3.1-70B", "v6e-256", 0.503, "v6e", (16, 16), 5, FULL),
    recipe("Llama2-70B, v6e-256", 17.373, "v6e", (16, 16), ("llama2_70b", 1024, 4096), 4, FULL),
    recipe("Llama3.1-8B, v6e-8", 3.416, "v6e", (2, 4), ("llama3_8b", 24, 8192), 3, FULL),
    recipe("Llama3.1-8B, v6e-16", 3.393, "v6e", (4, 4), ("llama3_8b", 48, 8192), 3, ATTENTION),
    recipe("Llama3.1-8B, v6e-32", 3.495, "v6e", (4, 8), ("llama3_8b", 96, 8192), 3, ATTENTION),
    recipe("Llama3.1-8B, v6e-64", 5.652, "v6e", (8, 8), ("llama3_8b", 320, 8192), 5, ATTENTION),
    recipe("Llama3.1-8B, v6e-128", 4.602, "v6e", (8, 16), ("llama3_8b", 512, 8192), 4, ATTENTION),
    recipe("Llama3.1-70B, v6e-64", 18.688, "v6e", (8, 8), ("llama3_70b", 128, 8192), 2, FULL, "model.offload=[input]"),
    recipe("Llama3.1-70B, v6e-128", 34.786, "v6e", (8, 16), ("llama3_70b", 512, 8192), 4, FULL),
    recipe("Llama3.1-70B, TPU7x-64", 12.20, "tpu7x", (4, 4, 4), ("llama3_70b", 256, 8192), 2, ATTENTION),
    recipe("Llama3.1-70B, TPU7x-256", 12.27, "tpu7x", (4, 8, 8), ("llama3_70b", 1024, 8192), 2, ATTENTION),
    t5x("2,2,4,1", 286e3, 896, 4),
    t5x("2,4,2,1", 300e3, 896, 4),
    t5x("4,2,2,1", 304e3, 896, 4),
    t5x("4,2,2,1", 322e3, 5376, 24),
    Published(OURS_11B, "tokens_per_second", 322e3, "v4", (4, 8, 8), (256, 1), "11b", 5376, 3, (*FSDP, ALL_MATMULS)),
    Published(
        "PaLM 540B, 6144 v4",
        "mfu",
        0.462,
        "v4",
        (12, 16, 16),
        (512, 12),
        "6_9b",
        2048,
        2,
        PALM,
        slices=2,
        full_attention=True,
    ),
    Published(
        "PyTorch/XLA FSDP 128B, v4-512", "mfu", 0.29, "v4", (4, 8, 8), (256, 1), "gpt2_128b", 1024, 1, (*FSDP, FULL)
    ),
]

MESH_128B = "published on FSDP over 16 and tensor parallelism over 16, ours on FSDP over 256"
T5X = "our tensor parallelism over 16 devices exposes 41 to 45 % of the step; theirs, sharded by GSPMD, less"
DIFFERS = {
    "Levanter 6.7B, v3-256": "the batch and the recomputation of this run are not published; Levanter's 13B is faster",
    "MaxText 128b, v5e-256": MESH_128B,
    **{row.name: T5X for row in TABLE if row.name.startswith("T5X")},
    OURS_11B: "published on (16, 16), ours on FSDP over 256, which the search found; theirs is an encoder-decoder, "
    "ours a decoder of as many parameters",
    "PyTorch/XLA FSDP 128B, v4-512": "another runtime; its authors state better figures with a larger batch per device",
}
"""Runs that do not share our parallelism or whose settings are unknown, and what differs.  No constant is fitted to
them."""


def comparable(rows: list[dict]) -> list[dict]:
    """The rows of published.jsonl with a ratio whose run shares our parallelism."""
    return [row for row in rows if row["published"]["ratio"] and row["published"]["name"] not in DIFFERS]


def constant(rows: list[dict]) -> float:
    """The geometric mean of the ratios."""
    return math.exp(sum(math.log(row["published"]["ratio"]) for row in rows) / len(rows))


def constants(rows: list[dict]) -> dict[str, Calibration]:
    """The calibration of each TPU version that has comparable rows, by device kind."""
    found = {}
    for kind in dict.fromkeys(row["device_kind"] for row in comparable(rows)):
        same = [row for row in comparable(rows) if row["device_kind"] == kind]
        ratios = [row["published"]["ratio"] for row in same]
        figures = (constant(same), min(ratios), max(ratios))
        found[kind] = Calibration(*(round(figure, 2) for figure in figures), len(same))
    return found


def constant_without(row: dict, rows: list[dict]) -> float | None:
    """The constant of the row's TPU version, fitted on comparable rows of other models; None if there are none."""
    others = [
        one for one in comparable(rows) if one["device_kind"] == row["device_kind"] and one["model"] != row["model"]
    ]
    return constant(others) if others else None


def main(arguments: argparse.Namespace) -> None:
    file = Path(arguments.json)
    file.parent.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["published"]["name"] for line in file.read_text().splitlines()} if file.exists() else set()
    for row in TABLE:
        if arguments.only not in row.name or row.name in done:
            continue
        print(f"\n{row.name}, published {row.figure} {row.value:,.3g} {row.note}", flush=True)
        config = config_of(row)
        predicted = predict(config, Slice(row.version, row.sides, row.slices)).row
        predicted.command = "python benchmarks/calibration.py"
        print(format_row(predicted), flush=True)
        found = predicted.to_json()
        value = as_counted_here(row, config)
        ratio = found[row.figure] / value if found[row.figure] else None
        if ratio:
            print(f"  predicted : published = {ratio:.2f}", flush=True)
        comparison = {"name": row.name, "figure": row.figure, "value": row.value, "note": row.note, "ratio": ratio}
        comparison["as_counted_here"] = value
        append_json(found | {"published": comparison}, file)


def as_counted_here(row: Published, config: Config) -> float:
    """The published figure, converted to an MFU that counts attention at half."""
    if not row.full_attention:
        return row.value
    return row.value * flops_per_token(config.model) / flops_per_token(config.model, causal=False)


def config_of(row: Published) -> Config:
    settings = [
        f"model={row.model}",
        f"mesh.dp={row.mesh[0]}",
        f"mesh.mp={row.mesh[1]}",
        f"train.batch={row.batch}",
        f"train.microbatches={row.microbatches}",
        f"mesh.slices={row.slices}",
        "mesh.zero=zero1",
    ]
    return load(str(CONF / "base.yaml"), [*settings, *row.more])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    parser.add_argument(
        "--json", default=str(RESULTS), help=f"append one object per line to this file (default: {RESULTS.name})"
    )
    parsed = parser.parse_args()
    sys.exit(run_command(lambda: main(parsed)))
