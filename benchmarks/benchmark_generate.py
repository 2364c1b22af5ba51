"""Tokens per second of greedy decoding beside transformers, and beside the bound of memory bandwidth, on this machine.

    python benchmarks/benchmark_generate.py DIR [--batch 1 8] [--prompt 32] [--new 64] [--repeats 5]

DIR is a Hugging Face directory.  Both programs decode the same prompts on the same cores in float32, alternately; each
figure is the median of the repeats.  The bound is the time in which the parameters, which a decode step reads once, are
read at the bandwidth that summing an array of 1 GiB reaches.
"""

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import check_environment  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np

import shmap_tp
from shmap_tp.errors import UserError
from shmap_tp.inference.generator import Options, stream
from shmap_tp.plan.flags import append_json, check_outputs
from shmap_tp.runtime.command_line import run_command

VALUES = 1 << 28
"""float32 values that are summed to measure the bandwidth: 1 GiB."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", metavar="DIR", help="a Hugging Face directory")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="sequences that are decoded together")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens that are decoded")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each program")
    parser.add_argument("--json", metavar="FILE", help="append a row for each batch size to FILE, with every repeat")
    return parser


def seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def bandwidth() -> float:
    """Bytes per second that summing an array reads: the best of 5."""
    values, total = jnp.ones(VALUES, jnp.float32), jax.jit(jnp.sum)
    run = lambda: total(values).block_until_ready()  # noqa: E731
    run()
    return VALUES * 4 / min(seconds(run) for _ in range(5))


def decode_seconds(model: shmap_tp.Model, prompts: list[list[int]], new: int) -> tuple[float, float]:
    """(seconds until the first token, seconds of the others) of one greedy generation."""
    options = Options(max_new_tokens=new)
    begin = time.perf_counter()
    pieces = stream(model.generation_programs, model.parameters, prompts, options)
    next(pieces)
    first = time.perf_counter()
    for _ in pieces:
        pass
    return first - begin, time.perf_counter() - first


def transformers_seconds(model: Any, prompts: list[list[int]], new: int) -> float:
    """Seconds of one greedy generation of `new` tokens."""
    import torch

    given = {"do_sample": False, "pad_token_id": 0}
    ids = torch.tensor(prompts)
    return seconds(lambda: model.generate(ids, max_new_tokens=new, min_new_tokens=new, **given))


def check(arguments: argparse.Namespace) -> None:
    """Raises UserError for a size out of range, and where --json cannot be written."""
    least_of = {"batch": 1, "prompt": 1, "new": 2, "repeats": 1}  # decoding begins with the second token
    for name, least in least_of.items():
        if np.min(getattr(arguments, name)) < least:
            raise UserError(f"--{name} must be at least {least}")
    check_outputs(arguments)


def measured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each batch size."""
    ours = shmap_tp.from_pretrained(arguments.directory, context=arguments.prompt + arguments.new)
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    theirs = AutoModelForCausalLM.from_pretrained(arguments.directory, dtype=torch.float32)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(ours.parameters))
    rows = []
    for batch in arguments.batch:
        draw = np.random.default_rng(batch).integers(10, 1000, (batch, arguments.prompt))
        prompts = draw.tolist()
        cold = sum(decode_seconds(ours, prompts, arguments.new))
        transformers_seconds(theirs, prompts, 4)
        found: dict[str, list[float]] = {"ours": [], "transformers": []}
        for _ in range(arguments.repeats):
            found["ours"].append(decode_seconds(ours, prompts, arguments.new)[1])
            first = transformers_seconds(theirs, prompts, 1)
            found["transformers"].append(transformers_seconds(theirs, prompts, arguments.new) - first)
        steps = arguments.new - 1
        speed = {name: batch * steps / statistics.median(times) for name, times in found.items()}
        warm = statistics.median(found["ours"])
        rows.append(
            {
                "kind": "measured",
                "model": Path(arguments.directory).resolve().name,
                "params": sum(leaf.size for leaf in jax.tree.leaves(ours.parameters)),
                "batch": batch,
                **{f"{name}_tokens_per_second": round(value, 1) for name, value in speed.items()},
                "ratio": round(speed["ours"] / speed["transformers"], 2),
                "bandwidth_GB_per_second": round((rate := bandwidth()) / 1e9, 1),
                "bound_tokens_per_second": round(batch * rate / size, 1),
                "share_of_bound": round(speed["ours"] / (batch * rate / size), 2),
                "compile_seconds": round(cold - warm, 1),
                "load": round(os.getloadavg()[0], 1),
                "seconds": {name: [round(each, 3) for each in times] for name, times in found.items()},
                "versions": {name: version(name) for name in ("jax", "torch", "transformers")},
                "command": shlex.join(["python", "benchmarks/benchmark_generate.py", *sys.argv[1:]]),
            }
        )
    return rows


def main(arguments: argparse.Namespace) -> None:
    check(arguments)
    rows = measured(arguments)
    columns = [name for name, value in rows[0].items() if isinstance(value, (int, float))]
    for row in rows if arguments.json else []:
        append_json(row, Path(arguments.json))
    print("| " + " | ".join(name.replace("_", " ") for name in columns) + " |")
    print("|" + " ---: |" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row[name]) for name in columns) + " |")


if __name__ == "__main__":
    parsed = parser().parse_args()
    sys.exit(run_command(lambda: main(parsed)))
