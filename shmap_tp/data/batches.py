"""Token files, and which of their windows each training step reads.

T context, n windows of a file, b rows of one microbatch.

A prepared directory holds `train.bin` and `validation.bin`: token ids one after the other, little-endian uint16 (uint32
where the vocabulary needs it), the format of nanoGPT.  `meta.json` beside them states the dtype and the sha256 of each;
without it the files are taken to be uint16.  Window w is tokens w T to w T + T inclusive: T inputs and their T targets.
Neighbouring windows share one token, and n = (tokens - 1) // T.

The order is a function of (seed, step) and of nothing else: sample i = step * batch + r lies in epoch i // n, at place
i % n of that epoch's permutation.  Neither hosts nor mesh enter, so any run can be continued on any machine.
Only `device_batch` touches JAX; everything before it is numpy.
"""

from collections.abc import Callable
from functools import cache, lru_cache, partial

import jax
import numpy as np
from jaxtyping import Int, Int32

from shmap_tp.config.schema import Config
from shmap_tp.data.token_files import SPLITS, TokenFile, identity, open_token_file
from shmap_tp.errors import UserError


@lru_cache(maxsize=2)  # a batch may straddle two epochs
def permutation(count: int, seed: int, epoch: int) -> Int[np.ndarray, " count"]:
    """The order in which an epoch visits its windows: each of 0 .. count - 1 once."""
    if seed < 0:
        raise UserError(f"run.seed={seed}: the order of the data needs a seed of 0 or more; use run.seed={-seed}")
    order = np.random.default_rng([seed, epoch]).permutation(count)
    order.setflags(write=False)
    return order


def training_order(count: int, seed: int, first: int, last: int) -> Int[np.ndarray, " rows"]:
    """Window numbers of the samples first .. last - 1, counted from the beginning of the run; they may cross epochs."""
    order = np.empty(last - first, np.int64)
    for epoch in range(first // count, -(-last // count)):
        start, stop = max(first, epoch * count), min(last, (epoch + 1) * count)
        here = permutation(count, seed, epoch)[start - epoch * count : stop - epoch * count]
        order[start - first : stop - first] = here
    return order


def training_rows(
    windows: TokenFile, seed: int, step: int, batch: int, first: int, last: int
) -> Int32[np.ndarray, "rows tokens"]:
    """Rows first .. last - 1 of the `batch` rows of one step (the first step is 0), [last - first, T + 1]."""
    assert 0 <= first <= last <= batch, (first, last, batch)
    return windows.read(training_order(len(windows), seed, step * batch + first, step * batch + last))


def evaluation_batches(windows: TokenFile, wanted: int, batch: int) -> int:
    """How many whole batches are evaluated: `wanted`, or as many as the file has.  At least one, else `InputError`."""
    available = len(windows) // batch
    if available < 1:
        raise UserError(
            f"{windows.path}: {len(windows)} windows of model.context={windows.context}, and one batch needs "
            f"train.batch={batch}; use train.batch={len(windows)} or less, or prepare more validation text"
        )
    return min(wanted, available)


def evaluation_rows(
    windows: TokenFile, index: int, batch: int, first: int, last: int
) -> Int32[np.ndarray, "rows tokens"]:
    """Rows first .. last - 1 of validation batch `index`, [last - first, T + 1]: always in file order."""
    assert 0 <= first <= last <= batch and (index + 1) * batch <= len(windows), (index, batch, first, last)
    return windows.read(np.arange(index * batch + first, index * batch + last))


def device_batch(
    rows: Callable[[int, int], np.ndarray], sharding: jax.sharding.Sharding, shape: tuple[int, int, int]
) -> Int32[jax.Array, "microbatches b tokens"]:
    """One step's batch on the devices, `shape` = [microbatches, b, T + 1], b cut over dp: P(None, 'dp', None).

    `rows(first, last)` gives rows of the step, [last - first, T + 1]; row r is in microbatch r // b at place r % b.
    A process asks only for the rows of its own devices, and once for each however many devices of mp hold it.
    The transfer is an explicit one, so that the loop around it can run under `transfer_guard("disallow")`.
    """
    size = shape[1]

    @cache
    def block(microbatches: range, places: range) -> np.ndarray:
        return np.stack([rows(m * size + places.start, m * size + places.stop) for m in microbatches])

    def part(index: tuple[slice, ...]) -> np.ndarray:
        microbatches, places = (range(*cut.indices(dim)) for cut, dim in zip(index[:2], shape[:2], strict=True))
        return block(microbatches, places)[:, :, index[2]]

    indices = sharding.addressable_devices_indices_map(shape)
    parts = jax.device_put([part(index) for index in indices.values()], list(indices))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


class Batches:
    """The batches of one run, on its devices."""

    identity: dict
    """What fixes which tokens step s reads; see `identity`."""
    validation_count: int
    """How many validation batches there are."""

    def __init__(self, config: Config, tokens: jax.ShapeDtypeStruct):
        """Opens and checks both token files.  `tokens` is the shape and sharding of a step's batch, [A, b, T + 1]."""
        vocabulary, context = config.model.vocabulary, config.model.context
        self._train, self._validation = (
            open_token_file(config.data.dir, split, context=context, vocabulary=vocabulary) for split in SPLITS
        )
        self._seed, self._batch, self._tokens = config.run.seed, config.train.batch, tokens
        self.identity = identity(self._train, self._validation, seed=self._seed, batch=self._batch)
        self.validation_count = evaluation_batches(self._validation, config.evaluate.batches, self._batch)

    def windows(self, step: int) -> Int[np.ndarray, " batch"]:
        """Numbers of the windows of train.bin that a step reads, counted from 0, as the steps are."""
        return training_order(len(self._train), self._seed, step * self._batch, (step + 1) * self._batch)

    def training(self, step: int) -> Int32[jax.Array, "microbatches b tokens"]:
        """The batch of a step, counted from 0."""
        rows = partial(training_rows, self._train, self._seed, step, self._batch)
        return device_batch(rows, self._tokens.sharding, self._tokens.shape)

    def validation(self, index: int) -> Int32[jax.Array, "microbatches b tokens"]:
        """Validation batch `index`, always the same windows."""
        rows = partial(evaluation_rows, self._validation, index, self._batch)
        return device_batch(rows, self._tokens.sharding, self._tokens.shape)
