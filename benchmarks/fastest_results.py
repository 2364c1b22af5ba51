"""The section of RESULTS.md on the fastest steps that we plan for the work of published runs, times the constant."""

from calibration import constants
from result_format import format_commands, gib_per_device, markdown_table, percent, read_rows, seconds

EXPERTS = {
    # (model, device kind, chips, tokens a step): published tokens/s of all chips
    ("mixtral_8x22b", "TPU v6 lite", 256, 8_388_608): 8_388_608 / 24.706,
    ("mixtral_8x7b", "TPU v6 lite", 256, 12_582_912): 12_582_912 / 13.48,
    ("mixtral_8x7b", "TPU v5", 128, 6_291_456): 128 * 2909,
}
"""MaxText with experts, to which no constant is fitted: tpu-recipes, training/trillium, steps of 24.706 and 13.48 s;
maxtext docs/reference/models/tiering.md, 2,909 tokens/s a chip (52.6 %), whose batch is not stated."""

COLUMNS = ["model", "chips", "tokens a step", "published step s", "our step s, predicted", "times the constant"]
COLUMNS += ["ahead", "MFU, times the constant", "tokens/s a chip beside the fewest chips: published, ours"]
COLUMNS += ["microbatches, remat", "GiB per device"]


def fastest_steps() -> str:
    """Every published run of Llama 3.1 on v6e, and of experts, beside the fastest row of the same work."""
    published = read_rows("published")
    factors = {kind: one.constant for kind, one in constants(published).items()}
    same_work = [row for row in published if row["published"]["name"].startswith("MaxText Llama3.1")]
    known = {_work(row): row["tokens_per_second"] / row["published"]["ratio"] for row in same_work} | EXPERTS
    ours: dict[tuple, dict] = {}
    planned = read_rows("fastest")
    for row in (*same_work, *planned):
        if row["step_seconds"] and row["device_kind"] in ("TPU v6 lite", "TPU v5") and _work(row) in known:
            ours[_work(row)] = min(row, ours.get(_work(row), row), key=lambda row: row["step_seconds"])
    lines = []
    for work in sorted(ours, key=lambda work: (work[0], work[1], work[2])):
        first = min((other for other in ours if other[:2] == work[:2]), key=lambda other: other[2])
        lines.append(_line(ours[work], known[work], factors[work[1]], ours[first], known[first]))
    return f"""## Fastest planned steps beside published ones, predicted

Published runs of Llama 3.1 on v6e, weakly scaled, and of Mixtral, beside the fastest step that we planned for the same
chips, model and tokens a step: FSDP over all chips, settings found with the formulas of the search and by hand.
`times the constant` multiplies it by the constant of the TPU version above, `ahead` is the published step over that.
The constant is fitted to our plain steps of the calibration, so that 1.00 means as fast as those.  Where no row below
is faster, the row is that of the calibration.  The rows of the commands below have kernels around splash attention,
which are charged the bytes that they move and have been measured nowhere.

{format_commands(planned)}

{markdown_table(COLUMNS, lines)}
"""


def _work(row: dict) -> tuple[str, str, int, int]:
    return row["model"], row["device_kind"], row["chips"], row["tokens_per_step"]


def _line(row: dict, published: float, factor: float, first: dict, published_first: float) -> list[str]:
    step, chips = row["step_seconds"], row["chips"]
    of_published = published / chips / (published_first / first["chips"])
    of_ours = row["tokens_per_second_per_chip"] / first["tokens_per_second_per_chip"]
    offload = f", offload {' + '.join(row['offload'])}" if row["offload"] else ""
    return [
        row["model"],
        f"{chips} x {row['device_kind']}",
        f"{row['tokens_per_step']:,}",
        seconds(row["tokens_per_step"] / published),
        seconds(step),
        seconds(step * factor),
        f"**{row['tokens_per_second'] / published / factor:.2f}**",
        percent(row["mfu"] / factor),
        f"{percent(of_published)}, {percent(of_ours)}" if row is not first else "-",
        f"{row['microbatches']}, {row['remat']}{offload}" + ", row-major" * bool(row.get("row_major")),
        gib_per_device(row),
    ]
