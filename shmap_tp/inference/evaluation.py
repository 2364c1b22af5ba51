"""The quality of a model on a token file: loss, perplexity, bits per byte, accuracy."""

import math
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from shmap_tp.config.schema import DataConfig
from shmap_tp.data.batches import open_data
from shmap_tp.data.metadata import Meta, read_meta
from shmap_tp.data.token_files import AnyTokenFile, open_token_file
from shmap_tp.data.tokenizer import Tokenizer, text_bytes
from shmap_tp.errors import UserError
from shmap_tp.inference.scoring import ScoringProgram
from shmap_tp.model.transformer import Transformer


def evaluate_file(
    program: ScoringProgram,
    parameters: Transformer,
    tokenizer: Tokenizer,
    data: DataConfig,
    split: str,
    limits: tuple[int | None, int],
) -> dict[str, int | float]:
    """Loss, perplexity, bits per byte and accuracy of the model on `split` of data.dir, in sequences of model.context
    tokens.  data.dir may be a bucket, which is read as in training.

    loss is the mean negative log-likelihood of a token in nats, perplexity its exponential.  bits_per_byte is the
    sum of the losses in bits, divided by the bytes of the text of the tokens; it compares models with other tokenizers
    (Gao et al. 2020, "The Pile", section 3.1).  accuracy is the share of tokens that were the most likely one.

    `limits` are (the number of sequences, None for all; how many are computed at a time).
    Raises UserError if the data cannot be read, or has no text.
    """
    model = program.model
    file, meta = _open(data, split, context=model.context, vocabulary=model.vocabulary)
    wanted, batch = limits
    count = min(wanted or len(file), len(file))
    batch = min(batch, count)
    nats, right, size = 0.0, 0, 0
    hidden = True if jax.process_index() else None  # None: where stderr is no terminal
    for first in tqdm(range(0, count, batch), desc=f"{data.dir}/{split}.bin", unit=" batches", disable=hidden):
        rows = file.read(np.arange(first, min(first + batch, count)))
        filled = np.concatenate([rows, np.repeat(rows[:1], batch - len(rows), axis=0)])  # one program for all batches
        likelihood, greedy = (found[: len(rows)] for found in program(parameters, filled))
        nats -= float(likelihood.sum(dtype=np.float64))
        right += int(greedy.sum())
        size += sum(text_bytes(tokenizer, row[1:].tolist(), meta.end_of_text) for row in rows)
    if not size:
        raise UserError(f"{data.dir}/{split}.bin: these {count} sequences hold only ends of documents, and no text")
    tokens = count * model.context
    return {
        "sequences": count,
        "tokens": tokens,
        "loss": nats / tokens,
        "perplexity": math.exp(min(nats / tokens, 700)),
        "bits_per_byte": nats / math.log(2) / size,
        "accuracy": right / tokens,
    }


def _open(data: DataConfig, split: str, **sizes: int) -> tuple[AnyTokenFile, Meta]:
    """The token file of `split`, and meta.json."""
    if "://" in data.dir:
        (file,), meta, _ = open_data(data, [split], **sizes)
        return file, meta
    return open_token_file(Path(data.dir), split, **sizes), read_meta(Path(data.dir))
