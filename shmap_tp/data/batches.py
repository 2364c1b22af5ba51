"""The sequences that each training step reads, and the step's batch as an array on the devices.

n sequences in a file, b sequences in one microbatch, T context.

The data order is a function of (seed, step) and of nothing else: sample i = step * batch + row is in epoch i // n, at
position i % n of that epoch's permutation.  It depends on neither the hosts nor the mesh, so a run can be resumed on
any machine.  Only `host_shards` and `on_devices` use JAX; everything before them is numpy.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

import jax
import numpy as np
from jaxtyping import Int, Int32

from shmap_tp.config.schema import Config, DataConfig, Documents, ModelConfig
from shmap_tp.data.location import Bucket, copy_files, open_bucket, prepared_directory
from shmap_tp.data.metadata import META, SPLITS, TOKENIZER, Meta, read_meta, read_tokenizer
from shmap_tp.data.read_ahead import ReadAhead
from shmap_tp.data.token_files import AnyTokenFile, BucketTokenFile, data_identity, open_token_file
from shmap_tp.data.tokenizer import Bytes, TextBytes, Tokenizer, has_sha256, tokenizer_of_data
from shmap_tp.errors import UserError
from shmap_tp.runtime.background import in_background
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.files import file_size, reading

_ONE_PERMUTATION = Lock()  # threads that read ahead would each compute the same one


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
        with _ONE_PERMUTATION:
            part = permutation(count, seed, epoch)[start - epoch * count : stop - epoch * count]
        order[start - first : stop - first] = part
    return order


def training_rows(
    file: AnyTokenFile, seed: int, step: int, batch: int, first: int, last: int
) -> Int32[np.ndarray, "rows tokens"]:
    """Rows first .. last - 1 of the `batch` rows of a step, [last - first, T + 1].  Steps are counted from 0."""
    assert 0 <= first <= last <= batch, (first, last, batch)
    return file.read(training_order(len(file), seed, step * batch + first, step * batch + last))


def validation_batch_count(file: AnyTokenFile, wanted: int, batch: int, multiple: int = 1) -> int:
    """Number of full validation batches: `wanted`, or as many as the file has.  Raises `UserError` if it has none.

    `multiple` is what a batch must be a multiple of: dp times the number of microbatches.
    """
    available = len(file) // batch
    if available < 1:
        largest = len(file) // multiple * multiple
        of = f", a multiple of {multiple} (mesh.dp x train.microbatches)" if multiple > 1 else ""
        smaller = f"use train.batch={largest} or less{of}, or " if largest else ""
        raise UserError(
            f"{file.path}: {len(file)} sequences of model.context={file.context}, but one batch needs "
            f"train.batch={batch}; {smaller}prepare more validation text"
        )
    return min(wanted, available)


def validation_rows(
    file: AnyTokenFile, index: int, batch: int, first: int, last: int
) -> Int32[np.ndarray, "rows tokens"]:
    """Rows first .. last - 1 of validation batch `index`, [last - first, T + 1], in file order."""
    assert 0 <= first <= last <= batch and (index + 1) * batch <= len(file), (index, batch, first, last)
    return file.read(np.arange(index * batch + first, index * batch + last))


def device_batch(
    rows: Callable[[int, int], np.ndarray], sharding: jax.sharding.Sharding, shape: tuple[int, int, int]
) -> Int32[jax.Array, "microbatches b tokens"]:
    """One step's batch on the devices: `shape` = [microbatches, b, T + 1], b sharded over dp, P(None, 'dp', None).

    `rows(first, last)` returns rows of the step, [last - first, T + 1]; row r is in microbatch r // b at index r % b.
    """
    return on_devices(host_shards(rows, sharding, shape), sharding, shape)


def host_shards(
    rows: Callable[[int, int], np.ndarray],
    sharding: jax.sharding.Sharding,
    shape: tuple[int, int, int],
    concurrently: bool = False,
) -> list[Int32[np.ndarray, "microbatches rows tokens"]]:
    """What `on_devices` puts on each device of this process; arguments as of `device_batch`.

    A process reads only the rows of its own devices, each once even if several mp ranks hold it, and neighbours in one
    call of `rows`.  The calls are made one after the other, or `concurrently`, in threads.
    """
    held = [
        tuple(range(*part.indices(dim)) for part, dim in zip(index[:2], shape[:2], strict=True))
        for index in sharding.addressable_devices_indices_map(shape).values()
    ]
    numbers = {each: np.add.outer(np.array(each[0]) * shape[1], np.array(each[1])) for each in held}
    needed = np.unique(np.concatenate([one.ravel() for one in numbers.values()]))
    runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(needed, np.flatnonzero(np.diff(needed) > 1) + 1)]
    if concurrently and len(runs) > 1:
        parts = [call.result() for call in [in_background(partial(rows, *run)) for run in runs]]
    else:
        parts = [rows(*run) for run in runs]
    read = np.concatenate(parts) if len(parts) > 1 else parts[0]
    shards = {each: read[np.searchsorted(needed, one)] for each, one in numbers.items()}
    return [shards[each] for each in held]


def on_devices(
    shards: list[Int32[np.ndarray, "microbatches rows tokens"]],
    sharding: jax.sharding.Sharding,
    shape: tuple[int, int, int],
) -> Int32[jax.Array, "microbatches b tokens"]:
    """The array of `shape` that has these `host_shards`.

    The host-to-device transfer is explicit, so the caller may run under `transfer_guard("disallow")`.
    """
    devices = list(sharding.addressable_devices_indices_map(shape))
    return jax.make_array_from_single_device_arrays(shape, sharding, jax.device_put(shards, devices))


def open_data(
    data: DataConfig, model: ModelConfig, splits: Sequence[str]
) -> tuple[list[AnyTokenFile], Meta, bytes | None]:
    """(the token files of `splits` for `model`, meta.json, tokenizer.json if there is one)."""
    sizes = {"context": model.context, "vocabulary": model.vocabulary}
    place, meta, tokenizer = _open_meta(data, model)
    check_rows(meta, data, model)
    if isinstance(place, Bucket):
        return [BucketTokenFile(place, split, meta, **sizes) for split in splits], meta, tokenizer
    return [open_token_file(place, split, **sizes) for split in splits], meta, tokenizer


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


def _open_meta(data: DataConfig, model: ModelConfig) -> tuple[Path | Bucket, Meta, bytes | None]:
    """(where the token files are, meta.json, tokenizer.json if there is one)."""
    if "://" in data.dir and data.cache is None:
        bucket = open_bucket(data, model.from_pretrained)
        with TemporaryDirectory() as small:
            copy_files(bucket, Path(small), bucket.files.keys() & {META, TOKENIZER})
            meta = read_meta(Path(small))
            return bucket, meta, read_tokenizer(Path(small), meta)
    directory = prepared_directory(data, model.from_pretrained)
    meta = read_meta(directory)
    return directory, meta, read_tokenizer(directory, meta)


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
    tokenizer: bytes | None
    """tokenizer.json of the data; None for bytes, and where there is no copy of it."""

    def __init__(self, config: Config, tokens: jax.ShapeDtypeStruct):
        """Open and check both token files.  `tokens` has the shape and sharding of a step's batch, [A, b, T + 1]."""
        (self._train, self._validation), meta, self.tokenizer = open_data(config.data, config.model, SPLITS)
        self._seed, self._batch, self._tokens = config.run.seed, config.train.batch, tokens
        if warning := data_warning(config, meta, max(self._train.largest, self._validation.largest)):
            print_on_process_0(warning)
        self._isolated = isolating_id(meta, config.data, config.model)
        order = {"seed": self._seed, "batch": self._batch, "isolated": self._isolated}
        self.identity = data_identity(self._train, self._validation, meta, **order)
        multiple = config.mesh.dp * config.train.microbatches
        self.validation_count = validation_batch_count(self._validation, config.evaluate.batches, self._batch, multiple)
        self._meta, self._directory = meta, config.data.dir
        self._training_shards = self._shards(self._training_rows, config.train.steps)
        self._validation_shards = self._shards(self._validation_rows, self.validation_count)

    def text_tokenizer(self) -> Tokenizer:
        """Text to ids of this data and back.  Raises UserError if its tokenizer is not known."""
        return tokenizer_of_data(self._meta, self.tokenizer, self._directory)

    def validation_bytes(self, tokenizer: Tokenizer) -> int:
        """UTF-8 bytes of the text of all targets of an evaluation that count."""
        rows = (validation_rows(self._validation, i, self._batch, 0, self._batch) for i in range(self.validation_count))
        return sum(map(TextBytes(tokenizer, self._meta.end_of_text, self._isolated), rows))

    def sequence_indices(self, step: int) -> Int[np.ndarray, " batch"]:
        """Indices of the sequences of train.bin that a step reads.  Steps are counted from 0."""
        return training_order(len(self._train), self._seed, step * self._batch, (step + 1) * self._batch)

    def training(self, step: int) -> Int32[jax.Array, "microbatches b tokens"]:
        """The batch of a step.  Steps are counted from 0."""
        return on_devices(self._training_shards(step), self._tokens.sharding, self._tokens.shape)

    def validation(self, index: int) -> Int32[jax.Array, "microbatches b tokens"]:
        """Validation batch `index`: the same sequences in every evaluation."""
        return on_devices(self._validation_shards(index), self._tokens.sharding, self._tokens.shape)

    def _training_rows(self, step: int, first: int, last: int) -> np.ndarray:
        return training_rows(self._train, self._seed, step, self._batch, first, last)

    def _validation_rows(self, index: int, first: int, last: int) -> np.ndarray:
        return validation_rows(self._validation, index, self._batch, first, last)

    def _shards(self, rows: Callable[[int, int, int], np.ndarray], count: int) -> Callable[[int], list[np.ndarray]]:
        """`host_shards` of batch 0 .. `count` - 1, a function of its number; `rows(number, first, last)` are its rows
        first .. last - 1.  Where the data is in a bucket, the next ones are read early."""
        remote = isinstance(self._train, BucketTokenFile)

        def read(number: int) -> list[np.ndarray]:
            return host_shards(partial(rows, number), self._tokens.sharding, self._tokens.shape, concurrently=remote)

        return ReadAhead(read, count) if remote else read
