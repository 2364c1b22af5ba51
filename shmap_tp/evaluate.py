"""Grade a trained model, on a token file or by the tasks of lm-evaluation-harness (docs/evaluation.md)."""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shmap_tp import command_model
from shmap_tp.config.choices import Documents
from shmap_tp.config.sources import each_source
from shmap_tp.config.values import SCHEMES, check_path
from shmap_tp.errors import UserError, refuse_first
from shmap_tp.runtime.command_line import end_without_readers, importing, run_command

DESCRIPTION = """\
Loss, perplexity, bits per byte and accuracy of a model on all of validation.bin or on files of text, or its results in
tasks of lm-evaluation-harness.
"""
EPILOG = """\
examples
  python -m shmap_tp.evaluate --checkpoint runs/first --data data/mine
  python -m shmap_tp.evaluate --pretrained DIR --text README.md
  python -m shmap_tp.evaluate --checkpoint runs/long --data data/books mesh.cp=4   rows longer than a device holds
  python -m shmap_tp.evaluate --pretrained DIR --tasks arc_easy,hellaswag --limit 100 mesh.mp=4
"""
ONLY_OF_FILES = "data", "split", "sequences", "text", "documents"
ONLY_OF_TASKS = "tasks_dir", "limit", "fewshot", "apply_chat_template"


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m shmap_tp.evaluate`."""
    parser = command_model.model_parser("evaluate", DESCRIPTION, EPILOG, several=True)
    parser.set_defaults(mesh_keys=(*command_model.MESH_KEYS, "mesh.cp"))
    add = parser.add_argument
    add("--data", metavar="DIR", help="a directory of shmap_tp.prepare (default: data.dir of the run)")
    add("--text", action="append", metavar="PATH", help="a file or directory of text in place of --data; repeatable")
    add("--field", metavar="NAME", help="the field with the text of a record in --text (text)")
    add("--split", choices=["validation", "train"], help="which file of it (validation)")
    add("--documents", choices=[*map(str, Documents)], help="does a token see earlier ones? (as in the run)")
    add("--sequences", type=int, metavar="N", help="only the first N sequences of the file")
    add("--tasks", type=_names, metavar="NAME,...", help="tasks of lm-evaluation-harness, not of text")
    add("--tasks-dir", metavar="DIR", help="YAML files of more tasks")
    add("--limit", type=int, metavar="N", help="only the first N documents of each task")
    add("--fewshot", type=int, metavar="N", help="examples before each document (default: the task's)")
    add("--apply-chat-template", action="store_true", default=None, help="put the tasks' questions as messages")
    add("--batch", type=int, default=16, metavar="N", help="sequences that are computed at a time (16)")
    add("--json", action="store_true", help="print one line of JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_intermixed_args(argv)
    return run_command(lambda: _evaluate(arguments))


def _names(text: str) -> list[str]:
    """The names of --tasks."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _table(result: dict) -> str:
    """`result` of a token file, or of tasks, in lines."""
    if "results" in result:
        from lm_eval.utils import make_table

        return make_table(result).rstrip()
    by_position = [("loss by tokens before", "")]
    by_position += [(_octave(each["after"]), each["loss"]) for each in result["loss_by_position"]]
    lines = [(name.replace("_", " "), value) for name, value in result.items() if name != "loss_by_position"]
    shown = [(name, format(value, ".4f") if isinstance(value, float) else value) for name, value in lines + by_position]
    return "\n".join(f"{name:<18}{value}".rstrip() for name, value in shown)


def _octave(first: int) -> str:
    """How many tokens those see whose loss a line has."""
    return f"  {first:,} to {2 * first - 1:,}" if first > 1 else "  1"


def _evaluate(arguments: argparse.Namespace) -> None:
    """Check the arguments, and print the result.  Raises UserError."""
    refuse_first(_faults(arguments))
    if arguments.data is not None:
        check_path("--data", arguments.data, SCHEMES["data.dir"])
    texts = _texts(arguments) if arguments.text else None
    with command_model.joined(arguments, texts=hashlib.sha256(json.dumps(texts).encode()).hexdigest()):
        result = _evaluate_tasks(arguments) if arguments.tasks else _evaluate_tokens(arguments, texts)
        print(json.dumps(result) if arguments.json else _table(result), flush=True)


def _faults(arguments: argparse.Namespace) -> Iterator[str]:
    for name in ("batch", "sequences", "limit"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            yield f"--{name} {value} must be at least 1"
    if (arguments.fewshot or 0) < 0:
        yield f"--fewshot {arguments.fewshot} must be at least 0"
    if arguments.tasks == []:
        yield "--tasks names no task; `lm-eval ls tasks` lists those of lm_eval"
    wrong = ONLY_OF_FILES if arguments.tasks else ONLY_OF_TASKS
    for name in wrong:
        if getattr(arguments, name) is not None:
            rule = "does not apply to --tasks; leave one of them out" if arguments.tasks else "needs --tasks NAME,..."
            yield f"--{name.replace('_', '-')} {rule}"
    if arguments.field and not arguments.text:
        yield "--field needs --text PATH"
    if arguments.text and (arguments.data or arguments.split):
        yield "--text is evaluated instead of --data and --split; leave them out"
    if "" in (arguments.text or []):
        yield "--text is empty; name a file, or a directory"
    if arguments.pretrained is not None and not (arguments.data or arguments.text or arguments.tasks):
        yield "--pretrained needs --data DIR or --text FILE: the directory does not say what to evaluate"


def _evaluate_tasks(arguments: argparse.Namespace) -> dict:
    """What lm_eval found, without what it says of each document.  Raises UserError."""

    try:
        with importing():
            from shmap_tp.inference.harness import HarnessModel, evaluate_tasks
    except ImportError as error:
        raise UserError(f"--tasks needs lm-evaluation-harness: pip install -e '.[evaluate]'\n{error}") from error
    from shmap_tp.inference.text import chat_template_of_model, tokenizer_of_model

    model = command_model.open_model(arguments)
    template = chat_template_of_model(model, None) if arguments.apply_chat_template else None
    adaptor = HarnessModel(model, tokenizer_of_model(model, arguments.tokenizer), arguments.batch, template)
    settings = {"limit": arguments.limit, "num_fewshot": arguments.fewshot, "apply_chat_template": template is not None}
    found = evaluate_tasks(adaptor, arguments.tasks, arguments.tasks_dir, **settings)
    kept = "results", "groups", "versions", "n-shot", "higher_is_better", "group_subtasks", "n-samples"
    return {name: found[name] for name in kept if name in found}


def _texts(arguments: argparse.Namespace) -> list[str]:
    """The documents of --text.  Raises UserError."""
    with importing():
        from shmap_tp.data.source_files import chunks_of, files_at, texts_of

    files, field = [file for path in arguments.text for file in files_at(path)], arguments.field or "text"
    return [text for chunk in chunks_of(files, field) for text in texts_of(chunk, field)]


def _evaluate_tokens(arguments: argparse.Namespace, texts: list[str] | None) -> dict:
    """The grades on `texts`, or on a token file where there are none.  Raises UserError."""
    with importing():
        from shmap_tp.inference.scoring import evaluate_file, evaluate_text
        from shmap_tp.inference.text import tokenizer_of_model

    model = command_model.open_model(arguments)
    data = model.config.data
    if data.sources and arguments.data is None and texts is None:
        places = ", ".join(f"{each.dir} ({name})" for name, each in each_source(data).items())
        raise UserError(f"the run has several sources; name the directory of one with --data: {places}")
    tokenizer = tokenizer_of_model(model, arguments.tokenizer)
    limits = arguments.sequences, arguments.batch
    if arguments.documents is not None:
        data = replace(data, documents=Documents(arguments.documents))
    if texts is not None:
        return evaluate_text(model.scoring_program, model.parameters, tokenizer, texts, limits, data.documents)
    data = data if arguments.data is None else replace(data, dir=arguments.data, sources={})
    split = arguments.split or "validation"
    return evaluate_file(model.scoring_program, model.parameters, tokenizer, data, split, limits)


if __name__ == "__main__":
    sys.exit(end_without_readers(main))
