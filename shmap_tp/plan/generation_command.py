"""`python -m shmap_tp.plan --decode`: flags to a predicted row of generation, its communication, and the report."""

import argparse
import shlex
import sys
from pathlib import Path

from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.plan.benchmark import append_json, config_from_flags
from shmap_tp.plan.communication.from_hlo import communication_in_hlo
from shmap_tp.plan.communication.generation import decode_communication, prefill_communication
from shmap_tp.plan.communication.ledger import Entry, table, without_trivial_axes
from shmap_tp.plan.communication.reconcile import reconcile
from shmap_tp.plan.generation import (
    DTYPE,
    GREEDY,
    GenerationPrediction,
    Requests,
    format_generation,
    predict_generation,
)
from shmap_tp.plan.targets import find_target
from shmap_tp.plan.topologies import Slice

PROMPT_TOKENS, NEW_TOKENS, PROMPTS = 1024, 256, 8
"""Where the flags say nothing else: tokens of a prompt and of its continuation, prompts on each dp rank."""


def generation_command(arguments: argparse.Namespace) -> None:
    """Print the predicted row, and the communication of a decode call as planned and as compiled.  Raises UserError."""
    batch, arguments.batch = arguments.batch, None  # config.train.batch does not matter
    config = config_from_flags(arguments, "llama3_8b", 1, 1)
    context = config.model.context
    requests = Requests(
        batch=PROMPTS * config.mesh.dp if batch is None else batch,
        prompt=min(PROMPT_TOKENS, context // 2) if arguments.prompt_tokens is None else arguments.prompt_tokens,
        new=min(NEW_TOKENS, context // 4) if arguments.new_tokens is None else arguments.new_tokens,
    )
    target = find_target(arguments.version, config.mesh.dp * config.mesh.mp, arguments.topology, config.mesh.slices)
    if not isinstance(target, Slice):
        raise UserError(f"--decode --version {arguments.version}: generation is planned for TPUs only; choose a TPU")
    print(f"compiling prefill and decode for {target} ...", flush=True)
    prediction = predict_generation(config, target, requests)
    prediction.row.command = shlex.join(["python", "-m", "shmap_tp.plan", *sys.argv[1:]])
    if arguments.json:
        append_json(prediction.row.to_json(), Path(arguments.json))
    print(format_generation(prediction.row))
    print_communication(config, requests, prediction)


def print_communication(config: Config, requests: Requests, prediction: GenerationPrediction) -> None:
    sizes = {DP: config.mesh.dp, MP: config.mesh.mp}

    def compare(name: str, planned: list[Entry], text: str | None) -> None:
        if text is not None:
            found = reconcile(planned, communication_in_hlo(text, sizes), sizes)
            print(f"\nCOMPILED COLLECTIVES of {name}: {found.report}")

    decode = decode_communication(config, requests.batch, GREEDY.decode_tokens, DTYPE)
    print(f"\nCOMMUNICATION of decoding {GREEDY.decode_tokens} tokens of each sequence (analytic)")
    print(table(without_trivial_axes(decode, sizes), total="together"))
    prefill = prefill_communication(config, requests.batch, requests.padded_prompt, DTYPE)
    compare("prefill", prefill, prediction.prefill.text)
    compare("decode", decode, prediction.decode.text)
