"""A task of lm-evaluation-harness in files of its own."""

import json
from pathlib import Path


def write_task(directory: Path) -> list[dict]:
    """A task `sums` in `directory`, a YAML file and its documents, which are returned."""
    lines = [{"input": f"{i} + 1 =", "choices": ["2", "3"], "answer": i - 1} for i in (1, 2)]
    (directory / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "sums.yaml").write_text(
        f"task: sums\ndataset_path: json\ndataset_kwargs:\n  data_files: {directory}/sums.jsonl\ntest_split: train\n"
        "output_type: multiple_choice\ndoc_to_text: '{{input}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: '{{answer}}'\nmetric_list:\n  - metric: acc\n"
    )
    return lines
