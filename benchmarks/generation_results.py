"""The section of RESULTS.md on generation: predicted for TPUs, and measured beside transformers on a CPU."""

from result_format import GIB, format_commands, markdown_table, read_rows

COLUMNS = ["model and slice", "(dp, mp)", "prompts x tokens", "GiB per device (cache)", "prefill ms"]
COLUMNS += ["decode ms a step", "bound ms", "tokens/s", "exposed ms"]


def generation() -> str:
    rows = read_rows("generation")
    return f"""## Generation

Predicted: prefill and decode compiled for the slice, bfloat16, greedy, 256 new tokens of each prompt; int8: matrices of
the blocks are held in it.  The bound of a decode step is the time to read the weights and the cache of a device once.
No published measurement does the same work, and nothing has been fitted.

{format_commands(rows)}

{markdown_table(COLUMNS, [_line(row) for row in rows])}

{_beside_transformers()}
"""


def _beside_transformers() -> str:
    rows = read_rows("generation_cpu")
    columns = ["model", "sequences", "tokens/s", "transformers", "ratio", "bound by bandwidth", "compile s"]
    lines = [
        [
            row["model"],
            str(row["batch"]),
            f"{row['ours_tokens_per_second']:.0f}",
            f"{row['transformers_tokens_per_second']:.0f}",
            f"**{row['ratio']:.2f}**",
            f"{row['bound_tokens_per_second']:.0f} ({row['bandwidth_GB_per_second']:.0f} GB/s)",
            f"{row['compile_seconds']:.1f}",
        ]
        for row in rows
    ]
    programs = ", ".join(f"{name} {number}" for name, number in rows[0]["versions"].items())
    return f"""Measured on two CPU cores that other work shares, float32, greedy, decode only: ours and transformers
alternately, medians of 5 ({programs}).
The bandwidth of this machine varies between 40 and 72 GB/s, and the bound with it.

{format_commands(rows)}

{markdown_table(columns, lines)}"""


def _line(row: dict) -> list[str]:
    return [
        f"{row['model']}{', int8' * (row.get('dtype') == 'int8')}, {row['chips']} x {row['device_kind']}",
        f"({row['dp']}, {row['mp']})",
        f"{row['batch']} x {row['prompt']}",
        f"{row['peak_bytes'] / GIB:.1f} of {row['limit_bytes'] / GIB:.1f} ({row['cache_bytes'] / GIB:.2f})",
        f"{1e3 * row['prefill_seconds']:,.0f}",
        f"{1e3 * row['decode_seconds']:.2f}",
        f"{1e3 * row['bound_seconds']:.2f}",
        f"{row['batch'] / row['decode_seconds']:,.0f}",
        f"{1e3 * row['exposed_comm_seconds']:.2f}",
    ]
