"""The sequences that each training step reads, and the step's batch as an array on the devices.

n sequences in a file, b sequences in one microbatch, T context.

The data order is a function of (seed, step) and of nothing else: sample i = step * batch + row is in epoch i // n, at
position i % n of that epoch's permutation.  It depends on neither the hosts nor the mesh, so a run can be resumed on
any machine.  Only `device_batch` uses JAX; everything before it is numpy.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import numpy as np
from jaxtyping import Int, Int32

from shmap_tp.config.schema import Config, DataConfig, Documents, ModelConfig
from shmap_tp.data.chat_template import ChatTemplate, chat_template_of_files
from shmap_tp.data.location import Bucket, copy_files, open_bucket, prepared_directory
from shmap_tp.data.metadata import (
    COMPANIONS,
    CONFIG,
    META,
    SPLITS,
    TEMPLATE,
    TOKENIZER,
    Meta,
    read_companions,
    read_meta,
)
from shmap_tp.data.token_files import AnyTokenFile, BucketTokenFile, data_identity, open_token_file
from shmap_tp.data.tokenizer import Bytes, TextBytes, Tokenizer, has_sha256, tokenizer_of_data
from shmap_tp.errors import UserError
from shmap_tp.model.tokens import IGNORE
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.files import file_size, parse_json, reading


@lru_cache(maxsize=2)  # a batch may cross from one epoch into the next
def permutation(count: int, seed: int, epoch: int) -> Int[np.ndarray, " count"]:
    """The order in which an epoch visits its sequences: each of 0 .. count - 1 once."""
    if seed < 0:
        raise UserError(f"run.seed={seed} is negative; the data order needs run.seed >= 0, such as run.seed={-seed}")
    order = np.random.default_rng([seed, epoch]).permutation(count)
    order.setflags(write=False)
    return order


def training_order(count: int, seed: int, first: int, last: int) -> Int[np.ndarray, " rows"]:
    """Sequence indices of samples first .. last - 1, counted from the beginning of the run.

    `count` is the number of sequences in the file.  The samples may span several epochs.
    """
    order = np.empty(last - first, np.int64)
    for epoch in range(first // count, -(-last // count)):
        start, stop = max(first, epoch * count), min(last, (epoch + 1) * count)
        part = permutation(count, seed, epoch)[start - epoch * count : stop - epoch * count]
        order[start - first : stop - first] = part
    return order


def training_rows(
    file: AnyTokenFile, seed: int, step: int, batch: int, first: int, last: int
) -> Int32[np.ndarray, "rows tokens"]:
    """Rows first .. last - 1 of the `batch` rows of a step, [last - first, T + 1].  Steps are counted from 0."""
    assert 0 <= first <= last <= batch, (first, last, batch)
    return file.read(training_order(len(file), seed, step * batch + first, step * batch + last))


def validation_batch_count(file: AnyTokenFile, wanted: int, batch: int) -> int:
    """Number of validation batches: `wanted`, or as many as the file has; the last one may not be full."""
    return min(wanted, -(-len(file) // batch))


def validation_rows(
    file: AnyTokenFile, index: int, batch: int, first: int, last: int
) -> Int32[np.ndarray, "rows tokens"]:
    """Rows first .. last - 1 of validation batch `index`, [last - first, T + 1], in file order.

    Rows without targets fill the last batch.
    """
    assert 0 <= first <= last <= batch and 0 <= index * batch < len(file), (index, batch, first, last)
    numbers = np.arange(index * batch + first, index * batch + last)
    rows = file.read(numbers[numbers < len(file)])
    return np.pad(rows, [(0, len(numbers) - len(rows)), (0, 0)], constant_values=IGNORE)


def device_batch(
    rows: Callable[[int, int], np.ndarray], sharding: jax.sharding.Sharding, shape: tuple[int, int, int]
) -> Int32[jax.Array, "microbatches b tokens"]:
    """One step's batch on the devices: `shape` = [microbatches, b, T + 1], b sharded over dp, P(None, 'dp', None).

    `rows(first, last)` returns rows of the step, [last - first, T + 1]; row r is in microbatch r // b at index r % b.
    A process reads only the rows of its own devices, and reads each once even if several mp ranks hold it.
    The host-to-device transfer is explicit, so the caller may run under `transfer_guard("disallow")`.
    """
    size = shape[1]

    @cache
    def read(microbatches: range, indices: range) -> np.ndarray:
        return np.stack([rows(m * size + indices.start, m * size + indices.stop) for m in microbatches])

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        microbatches, indices = (range(*part.indices(dim)) for part, dim in zip(index[:2], shape[:2], strict=True))
        return read(microbatches, indices)[:, :, index[2]]

    devices = sharding.addressable_devices_indices_map(shape)
    shards = jax.device_put([shard(index) for index in devices.values()], list(devices))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def open_data(
    data: DataConfig, model: ModelConfig, splits: Sequence[str]
) -> tuple[list[AnyTokenFile], Meta, dict[str, bytes]]:
    """(the token files of `splits` for `model`, meta.json, the files beside it that belong to the run)."""
    sizes = {"context": model.context, "vocabulary": model.vocabulary}
    place, meta, companions = _open_meta(data, model)
    check_rows(meta, data, model)
    if isinstance(place, Bucket):
        return [BucketTokenFile(place, split, meta, **sizes) for split in splits], meta, companions
    return [open_token_file(place, split, **sizes) for split in splits], meta, companions


def check_rows(meta: Meta, data: DataConfig, model: ModelConfig) -> None:
    """Raise UserError if the data was packed into rows that are not the sequences of `model`."""
    if meta.row not in (None, model.context):
        raise UserError(
            f"{data.dir} was packed into rows of {meta.row} tokens, but model.context={model.context}; "
            f"prepare it with --pack {model.context}, or train with model.context={meta.row}"
        )
    if meta.row is not None and data.documents == Documents.joined:
        raise UserError(
            f"{data.dir} was packed into rows for isolated documents, so they cannot be joined; use "
            f"data.documents=isolated (evaluate: --documents isolated), or prepare it without --pack"
        )


def _open_meta(data: DataConfig, model: ModelConfig) -> tuple[Path | Bucket, Meta, dict[str, bytes]]:
    """(where the token files are, meta.json, the files beside it that belong to the run)."""
    if "://" in data.dir and data.cache is None:
        bucket = open_bucket(data, model.from_pretrained)
        with TemporaryDirectory() as small:
            copy_files(bucket, Path(small), bucket.files.keys() & {META, *COMPANIONS})
            meta = read_meta(Path(small))
            return bucket, meta, read_companions(Path(small), meta)
    directory = prepared_directory(data, model.from_pretrained)
    meta = read_meta(directory)
    return directory, meta, read_companions(directory, meta)


def isolating_token(data: DataConfig, model: ModelConfig) -> int | None:
    """The id that ends each document of data.dir, where documents are isolated; None where they are joined.

    Raises UserError if there is no data, or meta.json does not state the id.
    """
    return None if data.documents == Documents.joined else isolating_id(_open_meta(data, model)[1], data, model)


def isolating_id(meta: Meta, data: DataConfig, model: ModelConfig) -> int | None:
    """As `isolating_token`, of data whose meta.json is `meta`."""
    if data.documents == Documents.joined:
        return None
    if meta.end_of_text is None or not 0 <= meta.end_of_text < model.vocabulary:
        raise UserError(
            f"documents are isolated, but {data.dir}/{META} has "
            f"{'no end_of_text' if meta.end_of_text is None else f'end_of_text={meta.end_of_text}, which is no id'}; "
            f"state there the id that ends each document,\nor join them: data.documents=joined (evaluate: --documents "
            f"joined)"
        )
    return meta.end_of_text


def data_warning(config: Config, meta: Meta, largest: int | None = None) -> str | None:
    """A line if the data is probably not that of the model, else None.

    It is not if it was tokenized with another tokenizer than model.from_pretrained has, or if the model has at least
    twice its vocabulary.  `meta` is its meta.json, `largest` its largest id, if that is known.
    """
    model, origin = config.model, config.model.from_pretrained
    own = Path(origin or "") / TOKENIZER
    if origin is not None and (meta.tokenizer_sha256 or meta.tokenizer == Bytes.name) and file_size(own) is not None:
        with reading(own):
            if not has_sha256(own.read_bytes(), meta.tokenizer_sha256):
                return (
                    f"warning: {config.data.dir} was tokenized with another tokenizer than {own} "
                    f"({meta.tokenizer}); prepare it with --tokenizer {origin}, if the model is to read it"
                )
    vocabulary = meta.vocabulary or (largest or 0) + 1
    if vocabulary > 1 and model.vocabulary >= 2 * vocabulary:
        tokenizer = f", tokenizer {meta.tokenizer}" if meta.tokenizer else ""
        return (
            f"warning: {config.data.dir} has a vocabulary of {vocabulary}{tokenizer}, but model.vocabulary="
            f"{model.vocabulary} (model {model.name}): is this the data of that model?"
        )
    return None


class Batches:
    """The training and validation batches of one run, on its devices."""

    identity: dict
    """Everything that determines which tokens each step reads; see `data_identity`."""
    validation_count: int
    """Number of validation batches."""
    companions: dict[str, bytes]
    """The files of the tokenizer and the chat template beside the data, by name."""

    def __init__(self, config: Config, tokens: jax.ShapeDtypeStruct):
        """Open and check both token files.  `tokens` has the shape and sharding of a step's batch, [A, b, T + 1]."""
        (self._train, self._validation), meta, self.companions = open_data(config.data, config.model, SPLITS)
        self._seed, self._batch, self._tokens = config.run.seed, config.train.batch, tokens
        if warning := data_warning(config, meta, max(self._train.largest, self._validation.largest)):
            print_on_process_0(warning)
        self._isolated = isolating_id(meta, config.data, config.model)
        order = {"seed": self._seed, "batch": self._batch, "isolated": self._isolated}
        self.identity = data_identity(self._train, self._validation, meta, **order)
        self.validation_count = validation_batch_count(self._validation, config.evaluate.batches, self._batch)
        self._meta, self._directory = meta, config.data.dir

    def text_tokenizer(self) -> Tokenizer:
        """Text to ids of this data and back.  Raises UserError if its tokenizer is not known."""
        return tokenizer_of_data(self._meta, self.companions, self._directory)

    def chat_template(self) -> ChatTemplate | None:
        """The template of the conversations, if the data is some.  Raises UserError if it cannot be used."""
        if TEMPLATE not in self.companions:
            return None
        place = f"{self._directory}/{CONFIG}"
        config = parse_json(self.companions.get(CONFIG, b"{}"), place)
        return chat_template_of_files(self.companions[TEMPLATE], config, f"{self._directory}/{TEMPLATE}")

    def validation_bytes(self, tokenizer: Tokenizer) -> int:
        """UTF-8 bytes of the text of all targets of an evaluation that count."""
        rows = (validation_rows(self._validation, i, self._batch, 0, self._batch) for i in range(self.validation_count))
        return sum(map(TextBytes(tokenizer, self._meta.end_of_text, self._isolated), rows))

    def sequence_indices(self, step: int) -> Int[np.ndarray, " batch"]:
        """Indices of the sequences of train.bin that a step reads.  Steps are counted from 0."""
        return training_order(len(self._train), self._seed, step * self._batch, (step + 1) * self._batch)

    def training(self, step: int) -> Int32[jax.Array, "microbatches b tokens"]:
        """The batch of a step.  Steps are counted from 0."""
        rows = partial(training_rows, self._train, self._seed, step, self._batch)
        return device_batch(rows, self._tokens.sharding, self._tokens.shape)

    def validation(self, index: int) -> Int32[jax.Array, "microbatches b tokens"]:
        """Validation batch `index`: the same sequences in every evaluation."""
        rows = partial(validation_rows, self._validation, index, self._batch)
        return device_batch(rows, self._tokens.sharding, self._tokens.shape)
