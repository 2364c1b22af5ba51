"""Read the rows of results/*.jsonl, and format them as Markdown."""

import json
from pathlib import Path

HERE = Path(__file__).parent
GIB = 2**30


def read_rows(name: str) -> list[dict]:
    """The rows of results/NAME.jsonl; none if there is no such file."""
    file = HERE / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def markdown_table(columns: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] * len(columns)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [columns, rule, *lines])


def format_commands(rows: list[dict]) -> str:
    return "```sh\n" + "\n".join(dict.fromkeys(row["command"] for row in rows)) + "\n```"


def format_kinds(rows: list[dict]) -> str:
    """measured, emulated or predicted."""
    return ", ".join(sorted({row["kind"] for row in rows}))


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:#.3g}".rstrip(".")


def exposed(row: dict) -> str:
    """Exposed communication as a percentage of the step."""
    return percent(row["exposed_comm_seconds"] / row["step_seconds"]) if row["step_seconds"] else "-"


def gib_per_device(row: dict) -> str:
    needed = "-" if row["peak_bytes_per_device"] is None else f"{row['peak_bytes_per_device'] / GIB:.2f}"
    available = "" if row["limit_bytes_per_device"] is None else f" of {row['limit_bytes_per_device'] / GIB:.2f}"
    host = f", host {row['host_bytes_per_device'] / GIB:.1f}" if row.get("host_bytes_per_device") else ""
    return f"{needed}{available}{host}" + ("" if row["fits"] else ", **does not fit**")
