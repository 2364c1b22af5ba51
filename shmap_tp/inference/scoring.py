"""Log-likelihood of given tokens, and whether each is the most likely one, over a vocabulary sharded over mp; and from
both the quality of a model on a token file.

B sequences, T positions, N positions of a chunk, D model width, V vocabulary rows, padded.  V/mp: sharded over mp.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

from shmap_tp.config.choices import Documents
from shmap_tp.config.schema import DataConfig, ModelConfig
from shmap_tp.data.batches import check_rows, isolating_id, open_data
from shmap_tp.data.metadata import Meta, read_meta
from shmap_tp.data.subwords import has_tokenized
from shmap_tp.data.token_files import TokenFile, open_token_file
from shmap_tp.data.tokenizer import TextBytes, Tokenizer
from shmap_tp.errors import UserError
from shmap_tp.inference.programs import GenerationPrograms
from shmap_tp.inference.sampling import argmax
from shmap_tp.layers.context import positions_of
from shmap_tp.layers.embedding import OutputProjection, score
from shmap_tp.model.loss import target_statistics
from shmap_tp.model.transformer import Carried, Transformer
from shmap_tp.parallel.collectives import all_gather_invariant
from shmap_tp.parallel.context_parallel import own_chunks, row_order, time_ranks
from shmap_tp.parallel.mesh import MP, Role, axes_of, batch_axes

POSITIONS_MULTIPLE = 128
"""Sequences are padded to a multiple of this, so that similar lengths share one program."""
CHUNK = 512
"""Positions whose logits exist at a time."""

Scores = tuple[Float[Array, " N"], Bool[Array, " N"]]
"""(log-likelihood in nats, whether it is the most likely token) of each target."""
Grades = dict[str, Any]
"""By name; `loss_by_position` is a list of them."""


class ScoringProgram:
    """Scores the tokens of sequences; compiled at the first call with another number of sequences or positions."""

    def __init__(self, programs: GenerationPrograms):
        self.model, self._programs = programs.model, programs
        self._axes, self._sizes = programs.mesh.axis_names, programs.mesh.shape
        self._run = jax.jit(self._mapped())

    def __call__(
        self,
        params: Transformer,
        tokens: np.ndarray,
        segments: np.ndarray | None = None,
        *,
        multiple: int = POSITIONS_MULTIPLE,
    ) -> tuple[np.ndarray, np.ndarray]:
        """tokens[B, T] -> (log-likelihood of tokens[:, 1:] given those before, whether each is the most likely one),
        float32[B, T-1] and bool[B, T-1].  The sequences, or their chunks where rows are split along time, are padded to
        a multiple of `multiple` positions.
        With segments[B, T], the number of the document of each token, those given are of the document of the token
        before."""
        batch, time = tokens.shape[0], tokens.shape[1] - 1
        of_batch, of_time = math.prod(self._sizes[axis] for axis in batch_axes(self._axes)), time_ranks(self._sizes)
        rows, multiple = -(-batch // of_batch) * of_batch, multiple * (2 * of_time if of_time > 1 else 1)
        length = min(-(-time // multiple) * multiple, self.model.context)
        more = [(0, rows - batch), (0, length - time)]
        padded = [None if x is None else np.pad(np.asarray(x, np.int32), more) for x in (tokens, segments)]
        found = self._run(params, *padded)
        likelihood, greedy = (np.asarray(x)[:batch, :time] for x in found)
        return likelihood, greedy

    def _mapped(self) -> Callable[[Transformer, Array], tuple[Array, Array]]:
        execution, batch, time = self._programs.execution, batch_axes(self._axes), axes_of(Role.time, self._axes)

        def run(
            params: Transformer, inputs_BT: Int[Array, "B T"], targets_BT: Int[Array, "B T"], carried: Carried
        ) -> tuple[Array, Array]:
            inputs_BT, targets_BT, positions_BT = own_chunks((inputs_BT, targets_BT, carried.positions))
            h_BTD, _ = params(inputs_BT, execution, Carried(positions_BT, carried.segments))
            h_BTD, projection = params.output_projection(h_BTD, execution)
            scores = _in_chunks(partial(_scores, projection, self.model.vocabulary), h_BTD, targets_BT)
            if time:
                scores = jax.tree.map(lambda x: all_gather_invariant(x, time, 1), scores)
            return jax.tree.map(lambda x: all_gather_invariant(x, batch, 0), scores)

        def mapped(
            params: Transformer, tokens_BT: Int[Array, "B T"], segments_BT: Int[Array, "B T"] | None
        ) -> tuple[Array, Array]:
            inputs_BT, segments_BT = tokens_BT[:, :-1], None if segments_BT is None else segments_BT[:, :-1]
            carried = Carried(positions_of(inputs_BT, self._axes, segments_BT), segments_BT)
            rows = P(batch, None)
            scored = self._programs.sharded.mapped(run, (rows, rows, rows), (P(), P()))
            scores = scored(params, inputs_BT, tokens_BT[:, 1:], carried)
            return jax.tree.map(lambda x: row_order(x, time_ranks(self._sizes), 1), scores)

        return mapped


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
    """All-gathers over mp of five values per position.  Where several logits are the largest, the lowest id counts, as
    for `argmax` and in greedy generation."""
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
) -> Grades:
    """The grades (`_grades`) of the model on `split` of data.dir, in sequences of model.context tokens.

    data.dir may be a bucket, which is read as in training.

    `limits` are (the number of sequences, None for all; how many are computed at a time).  Process 0 says on stderr if
    the data was tokenized with another tokenizer, for which the results mean nothing, or has preference pairs.
    Raises UserError if the data cannot be read, or has no text.
    """
    file, meta = _open(data, split, program.model)
    check_rows(meta, data, program.model)
    if not has_tokenized(tokenizer, meta) and jax.process_index() == 0:
        print(
            f"warning: {data.dir} was tokenized with {meta.tokenizer}, which is not the tokenizer of the model "
            f"({tokenizer.name}): its results mean nothing;\nprepare the text with the model's: "
            f"python -m shmap_tp.prepare ... --tokenizer FILE",
            file=sys.stderr,
        )
    if meta.pairs is not None and jax.process_index() == 0:
        print(
            f"{data.dir} has preference pairs: this is the loss of the next token over both answers of each,\n"
            f"not that of the preferences, which a run with train.dpo_beta records in metrics.jsonl",
            file=sys.stderr,
        )
    wanted, batch = limits
    count = min(wanted or len(file), len(file))
    name = f"{data.dir}/{split}.bin"
    hidden = True if jax.process_index() else None  # None: where stderr is no terminal
    firsts = tqdm(range(0, count, batch), desc=name, unit=" batches", disable=hidden)
    batches = (file.read(np.arange(first, min(first + batch, count))) for first in firsts)
    isolated = isolating_id(meta, data, program.model)
    return _grades(program, parameters, batches, TextBytes(tokenizer, meta.end_of_text, isolated), name)


def evaluate_text(
    program: ScoringProgram,
    parameters: Transformer,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    limits: tuple[int | None, int],
    documents: Documents,
) -> Grades:
    """The grades (`_grades`) of the model on documents, in sequences of model.context tokens, the last one shorter.

    The end of text is between two documents.  The model's first token is before all of them, or before each where they
    are isolated; for a model without one the end of text is before all.  `limits` as of `evaluate_file`.  Raises
    UserError if there is no text, the model lacks one of the ids, or no id can isolate documents.
    """
    if not any(texts):
        raise UserError("--text has no text; name files that have some")
    end, context = tokenizer.end_of_text, program.model.context
    parts = [ids.astype(np.int32) for ids in tokenizer.encode_documents([*texts])]
    between = np.array([] if end is None else [end], np.int32)
    start = between if tokenizer.begin_of_text is None else np.array([tokenizer.begin_of_text], np.int32)
    isolated = end if documents == Documents.isolated else None
    if end is None and documents == Documents.isolated and len(texts) > 1:
        raise UserError(f"the tokenizer {tokenizer.name} has no end of text to end documents; use --documents joined")
    if isolated is not None and tokenizer.begin_of_text is not None:
        between = np.concatenate([between, start])
    ids = np.concatenate([start, *(part for each in parts for part in (each, between))])[: -len(between) or None]
    if (largest := int(ids.max(initial=0))) >= program.model.vocabulary:
        raise UserError(
            f"--text has the id {largest} of the tokenizer {tokenizer.name}, but model.vocabulary="
            f"{program.model.vocabulary}; name the tokenizer of the model with --tokenizer"
        )
    wanted, batch = limits
    starts = range(0, len(ids) - 1, context)[:wanted]
    rows = [ids[first : first + context + 1] for first in starts]
    full = [row for row in rows if len(row) == context + 1]
    batches = [np.stack(full[first : first + batch]) for first in range(0, len(full), batch)]
    batches += [row[None] for row in rows if len(row) <= context]
    return _grades(program, parameters, batches, TextBytes(tokenizer, tokenizer.begin_of_text, isolated), "--text")


def _grades(
    program: ScoringProgram, parameters: Transformer, batches: Iterable[np.ndarray], text_bytes: TextBytes, name: str
) -> Grades:
    """Loss, perplexity, bits per byte and accuracy on batches [rows, tokens]; `name` is that of the text in messages.

    Where documents are isolated, each is read as if it were alone, and its first token is not graded.
    Only the targets of conversations that count are graded.
    loss is the mean negative log-likelihood of a token in nats, perplexity its exponential.  bits_per_byte is the
    sum of the losses in bits, divided by the bytes of the text of the tokens; it compares models with other tokenizers
    (Gao et al. 2020, "The Pile", section 3.1).  accuracy is the share of tokens that were the most likely one.
    loss_by_position has the loss of the tokens that see `after` to 2 after - 1 tokens of their row and document, for
    each power of two `after` that has some: a model that uses a long context predicts later ones better.
    Raises UserError if the tokens have no text.
    """
    right, size, sequences, tokens, shape = 0, 0, 0, 0, None
    nats_of, tokens_of = np.zeros(64), np.zeros(64, int)  # by the logarithm of the number of tokens before
    for rows in batches:
        shape = shape if shape and shape[1] == rows.shape[1] else rows.shape
        more = np.repeat(rows[:1], shape[0] - len(rows), axis=0)
        marked = np.concatenate([rows, more])  # one program for all batches
        filled = np.maximum(marked, ~marked)
        ends = filled == text_bytes.isolated
        segments = None if text_bytes.isolated is None else np.cumsum(ends, axis=1) - ends
        likelihood, greedy = (found[: len(rows)] for found in program(parameters, filled, segments))
        graded = ~ends[: len(rows), :-1] & (rows[:, 1:] >= 0)
        octave = np.frexp(_tokens_before(None if segments is None else segments[: len(rows)], rows.shape))[1] - 1
        nats_of -= np.bincount(octave[graded], likelihood[graded].astype(np.float64), 64)
        tokens_of += np.bincount(octave[graded], minlength=64)
        right += int(greedy[graded].sum())
        size += text_bytes(rows)
        sequences, tokens = sequences + len(rows), tokens + int(graded.sum())
    if not size:
        raise UserError(f"{name}: these {sequences} sequences hold only ends of documents, and no text")
    nats = float(nats_of.sum())
    return {
        "sequences": sequences,
        "tokens": tokens,
        "loss": nats / tokens,
        "perplexity": math.exp(min(nats / tokens, 700)),
        "bits_per_byte": nats / math.log(2) / size,
        "accuracy": right / tokens,
        "loss_by_position": [
            {"after": 2 ** int(each), "tokens": int(tokens_of[each]), "loss": float(nats_of[each] / tokens_of[each])}
            for each in np.flatnonzero(tokens_of)
        ],
    }


def _tokens_before(segments_BT: Int[np.ndarray, "B T"] | None, shape: tuple[int, int]) -> Int[np.ndarray, "B _"]:
    """How many tokens of its row, and of the document of the one before it, each token but the first sees."""
    place = np.broadcast_to(np.arange(shape[1]), shape)
    if segments_BT is None:
        return place[:, 1:]
    begins = np.diff(segments_BT, axis=1, prepend=-1) != 0
    return (place - np.maximum.accumulate(np.where(begins, place, 0), axis=1))[:, :-1] + 1


def _open(data: DataConfig, split: str, model: ModelConfig) -> tuple[TokenFile, Meta]:
    """The token file of `split`, and meta.json."""
    if "://" in data.dir:
        (file,), meta, _ = open_data(data, model, [split])
        return file, meta
    directory = Path(data.dir)
    file = open_token_file(directory, split, context=model.context, vocabulary=model.vocabulary)
    return file, read_meta(directory)


# Batches of requests of similar lengths, so that little of what is computed is padding

MOST_PADDING = 0.1
"""Share of the slots of a batch that may be padding."""
STEPS_PER_OCTAVE = 16
"""Lengths between a power of two and the next that batches may have: fewer lengths are fewer programs to compile."""


class LengthBatch(NamedTuple):
    """Requests that are computed together."""

    requests: list[int]
    """Their numbers."""
    length: int
    """What each is padded to."""


def length_batches(lengths: Sequence[int], rows: int, multiple: int = 1) -> list[LengthBatch]:
    """Every request once, in batches of at most `rows`, the longest first.

    At most MOST_PADDING of the slots of a batch are padding, whatever the lengths; lengths are a multiple of
    `multiple`, which can add more.
    """
    found: list[LengthBatch] = []
    tokens = 0
    for request in sorted(range(len(lengths)), key=lambda request: -lengths[request]):
        tokens += lengths[request]
        if found and len(found[-1].requests) < rows:
            slots = (len(found[-1].requests) + 1) * found[-1].length
            if slots - tokens <= MOST_PADDING * slots:
                found[-1].requests.append(request)
                continue
        found.append(LengthBatch([request], rounded_length(lengths[request], multiple)))
        tokens = lengths[request]
    return found


def rounded_length(length: int, multiple: int = 1) -> int:
    """The next length that batches may have: at most 1/STEPS_PER_OCTAVE longer, and a multiple of `multiple`."""
    step = max(1 << max(length.bit_length() - 1, 0), STEPS_PER_OCTAVE) // STEPS_PER_OCTAVE
    rounded = -(-length // step) * step
    return -(-rounded // multiple) * multiple
