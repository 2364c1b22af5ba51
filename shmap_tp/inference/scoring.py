"""Log-likelihood of given tokens, and whether each is the most likely one, over a vocabulary sharded over mp; and from
both the quality of a model on a token file.

B sequences, T positions, N positions of a chunk, D model width, V vocabulary rows, padded.  V/mp: sharded over mp.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

from shmap_tp.config.schema import DataConfig, ModelConfig
from shmap_tp.data.batches import open_data
from shmap_tp.data.metadata import Meta, read_meta
from shmap_tp.data.token_files import AnyTokenFile, open_token_file
from shmap_tp.data.tokenizer import TextBytes, Tokenizer, has_tokenized
from shmap_tp.errors import UserError
from shmap_tp.inference.programs import GenerationPrograms
from shmap_tp.inference.sampling import argmax
from shmap_tp.layers.embedding import OutputProjection, score
from shmap_tp.model.loss import target_statistics
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.collectives import all_gather_invariant
from shmap_tp.parallel.mesh import MP

POSITIONS_MULTIPLE = 128
"""Sequences are padded to a multiple of this, so that similar lengths share one program."""
CHUNK = 512
"""Positions whose logits exist at a time."""

Scores = tuple[Float[Array, " N"], Bool[Array, " N"]]
"""(log-likelihood in nats, whether it is the most likely token) of each target."""


class ScoringProgram:
    """Scores the tokens of sequences; compiled at the first call with another number of sequences or positions."""

    def __init__(self, programs: GenerationPrograms):
        self.model, self._programs = programs.model, programs
        self._run = jax.jit(self._mapped())

    def __call__(
        self, params: Transformer, tokens: np.ndarray, *, multiple: int = POSITIONS_MULTIPLE
    ) -> tuple[np.ndarray, np.ndarray]:
        """tokens[B, T] -> (log-likelihood of tokens[:, 1:] given those before, whether each is the most likely one),
        float32[B, T-1] and bool[B, T-1].  The sequences are padded to a multiple of `multiple` positions."""
        batch, time = tokens.shape[0], tokens.shape[1] - 1
        rows = -(-batch // self._programs.batch_ranks) * self._programs.batch_ranks
        length = min(-(-time // multiple) * multiple, self.model.context)
        padded = np.zeros((rows, length + 1), np.int32)
        padded[:batch, : time + 1] = tokens
        found = self._run(params, padded)
        likelihood, greedy = (np.asarray(x)[:batch, :time] for x in found)
        return likelihood, greedy

    def _mapped(self) -> Callable[[Transformer, Array], tuple[Array, Array]]:
        execution, batch = self._programs.execution, self._programs.batch

        def run(params: Transformer, tokens_BT: Int[Array, "B T"]) -> tuple[Array, Array]:
            h_BTD, _ = params(tokens_BT[:, :-1], execution)
            h_BTD, projection = params.output_projection(h_BTD, execution)
            scores = _in_chunks(partial(_scores, projection, self.model.vocabulary), h_BTD, tokens_BT[:, 1:])
            return jax.tree.map(lambda x: all_gather_invariant(x, batch, 0), scores)

        return self._programs.sharded.mapped(run, (P(batch, None),), (P(), P()))


def _in_chunks(
    scores: Callable[[Array, Array], Scores], h_BTD: Float[Array, "B T D"], targets_BT: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """`scores` of all positions, CHUNK at a time."""
    shape, positions = targets_BT.shape, targets_BT.size
    chunks = -(-positions // CHUNK)
    h = jnp.pad(h_BTD.reshape(positions, -1), [(0, chunks * CHUNK - positions), (0, 0)])
    targets = jnp.pad(targets_BT.reshape(-1), (0, chunks * CHUNK - positions))
    found = lax.map(lambda each: scores(*each), (h.reshape(chunks, CHUNK, -1), targets.reshape(chunks, CHUNK)))
    return jax.tree.map(lambda x: x.reshape(-1)[:positions].reshape(shape), found)


def _scores(
    projection: OutputProjection, vocabulary: int, h_ND: Float[Array, "N D"], targets_N: Int[Array, " N"]
) -> Scores:
    """All-gathers over mp of five values per position.  Of equal largest logits that of the lowest id counts, as for
    `argmax` and in greedy generation."""
    found = target_statistics(score(h_ND, projection), targets_N, vocabulary)
    id_V = lax.axis_index(MP) * found.logits_NV.shape[1] + jnp.arange(found.logits_NV.shape[1])
    return found.target_N - found.max_N - jnp.log(found.z_N), argmax(found.logits_NV, id_V) == targets_N


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

    `limits` are (the number of sequences, None for all; how many are computed at a time).  Process 0 says on stderr if
    the data was tokenized with another tokenizer: then the results mean nothing.
    Raises UserError if the data cannot be read, or has no text.
    """
    model = program.model
    file, meta = _open(data, split, model)
    if not has_tokenized(tokenizer, meta) and jax.process_index() == 0:
        print(
            f"warning: {data.dir} was tokenized with {meta.tokenizer}, which is not the tokenizer of the model "
            f"({tokenizer.name}): its results mean nothing;\nprepare the text with the model's: "
            f"python -m shmap_tp.prepare ... --tokenizer FILE",
            file=sys.stderr,
        )
    wanted, batch = limits
    count = min(wanted or len(file), len(file))
    batch = min(batch, count)
    nats, right, size, text_bytes = 0.0, 0, 0, TextBytes(tokenizer, meta.end_of_text)
    hidden = True if jax.process_index() else None  # None: where stderr is no terminal
    for first in tqdm(range(0, count, batch), desc=f"{data.dir}/{split}.bin", unit=" batches", disable=hidden):
        rows = file.read(np.arange(first, min(first + batch, count)))
        filled = np.concatenate([rows, np.repeat(rows[:1], batch - len(rows), axis=0)])  # one program for all batches
        likelihood, greedy = (found[: len(rows)] for found in program(parameters, filled))
        nats -= float(likelihood.sum(dtype=np.float64))
        right += int(greedy.sum())
        size += text_bytes(rows)
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


def _open(data: DataConfig, split: str, model: ModelConfig) -> tuple[AnyTokenFile, Meta]:
    """The token file of `split`, and meta.json."""
    if "://" in data.dir:
        (file,), meta, _ = open_data(data, model, [split])
        return file, meta
    directory = Path(data.dir)
    file = open_token_file(directory, split, context=model.context, vocabulary=model.vocabulary)
    return file, read_meta(directory)
