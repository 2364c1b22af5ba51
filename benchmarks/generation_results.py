"""The section of RESULTS.md on generation: predicted for TPUs."""

from result_format import GIB, format_commands, markdown_table, read_rows

COLUMNS = ["model and slice", "(dp, mp)", "prompts x tokens", "GiB per device (cache)", "prefill ms"]
COLUMNS += ["decode ms a step", "bound ms", "tokens/s", "exposed ms"]


def generation() -> str:
    rows = read_rows("generation")
    return f"""## Generation

Predicted: prefill and decode compiled for the slice, bfloat16, greedy, 256 new tokens of each prompt.  The bound of a
decode step is the time to read the weights and the cache of a device once.  No published measurement does the same
work, and nothing has been fitted.

{format_commands(rows)}

{markdown_table(COLUMNS, [_line(row) for row in rows])}
"""


def _line(row: dict) -> list[str]:
    return [
        f"{row['model']}, {row['chips']} x {row['device_kind']}",
        f"({row['dp']}, {row['mp']})",
        f"{row['batch']} x {row['prompt']}",
        f"{row['peak_bytes'] / GIB:.1f} of {row['limit_bytes'] / GIB:.1f} ({row['cache_bytes'] / GIB:.2f})",
        f"{1e3 * row['prefill_seconds']:,.0f}",
        f"{1e3 * row['decode_seconds']:.2f}",
        f"{1e3 * row['bound_seconds']:.2f}",
        f"{row['batch'] / row['decode_seconds']:,.0f}",
        f"{1e3 * row['exposed_comm_seconds']:.2f}",
    ]
