"""Patterns that say how one of our parameters is stored in a tensor of a file.

    "v d -> v d"                the same
    "d f -> f d"                transposed
    "(n k) d -> d n k"          the rows of the file are heads, one after the other
    "(h 0/3 k) d -> (h k) d"    the first of three of every head: GPT-NeoX's fused q, k and v
    "d (0/3 h k) -> (h k) d"    the first third of the columns: GPT-2's fused q, k and v
    "(1/h+n+n k) d -> d n k"    the n heads after the first h, of h + n + n: Phi-3's fused q, k and v

Left of the arrow stand the dims of the file's tensor, right of it those of our array, for one layer; a letter is a dim
of `sizes_of`, and letters in brackets are one dim in which the last varies fastest.  i/n selects one of n equal parts;
i/h+n+n selects one of three parts of h, n and n, which is a dim of that letter.

A slice of our array is a list of `Part`s: boxes of the file's tensor with all letters as dims of their own.  The same
parts serve reading and writing, so that what is written is the inverse of what is read.  A parameter is read
and written one piece of bounded size at a time.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

from shmap_tp.config.schema import ModelConfig
from shmap_tp.pretrained.tensor_files import Box, NewTensor, StoredTensor

Ranges = tuple[tuple[int, int], ...]
"""The range [start, stop) of each dim of our array."""
PIECE_BYTES = 128 * 2**20
"""About how much of a parameter a process reads or writes at a time.  Beside its shards it holds a few times as much:
in the file's order, in ours, and on its way to the devices."""


def tensors_within(ranges: Ranges) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(the place in a slice, the index) of every tensor that the slice reaches, from its ranges of those dims that
    divide our array into tensors; without such dims of the only one, at ()."""
    for place in np.ndindex(*(stop - start for start, stop in ranges)):
        yield place, tuple(start + at for (start, _), at in zip(ranges, place, strict=True))


def sizes_of(model: ModelConfig) -> dict[str, int]:
    """The size of each letter of a pattern.  v is without padding: files have none."""
    return {
        "d": model.width,
        "h": model.heads,
        "n": model.kv_heads,
        "k": model.head_dim,
        "f": model.ffn,
        "v": model.vocabulary,
        "t": model.context,
        "r": model.adapter.rank,
        "e": model.experts,
    }


@dataclass(frozen=True)
class Part:
    """A box of the file's tensor, and where it belongs in our array."""

    box: Box
    ours: tuple[slice, ...]
    """The part of the slice of our array, dim by dim."""
    letters_shape: tuple[int, ...]
    """The same part with every letter as a dim of its own, in our order."""


@dataclass(frozen=True)
class Layout:
    """A pattern, with the sizes of its letters."""

    pattern: str
    sizes: Mapping[str, int]

    @cached_property
    def _sides(self) -> tuple[list[list[str]], list[list[str]]]:
        """The dims of the file's tensor and of our array, each a list of letters or i/n."""
        left, right = (
            [dim.strip("()").split() for dim in re.findall(r"\([^)]*\)|\S+", side)] for side in self.pattern.split("->")
        )
        return left, right

    @cached_property
    def view(self) -> tuple[int, ...]:
        """The shape of the file's tensor with every letter as a dim of its own."""
        return tuple(self._size(token) for token in itertools.chain(*self._sides[0]))

    @cached_property
    def file_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self._size(token) for token in dim) for dim in self._sides[0])

    @cached_property
    def our_shape(self) -> tuple[int, ...]:
        """The shape of our array of one layer, without padding of the vocabulary."""
        return tuple(math.prod(self._size(token) for token in dim) for dim in self._sides[1])

    def _size(self, token: str) -> int:
        _, _, parts = token.partition("/")
        if "+" in parts:
            return sum(self._sizes(parts))
        return int(parts) if parts else self.sizes[token]

    def _sizes(self, parts: str) -> list[int]:
        return [self.sizes[letter] for letter in parts.split("+")]

    def read(self, tensor: StoredTensor, ranges: Ranges, dtype: np.dtype) -> Float[np.ndarray, "..."]:
        """A slice of our array; what lies outside of the file's tensor is zero (padding of the vocabulary)."""
        out = np.zeros([stop - start for start, stop in ranges], dtype)
        for part in self.parts(ranges):
            values = self._read(tensor, part.box)
            out[part.ours] = values.transpose(self._order).reshape([s.stop - s.start for s in part.ours])
        return out

    def _read(self, tensor: StoredTensor, box: Box) -> np.ndarray:
        """`box` of a tensor, with each letter as a dim; what lies between is read, too, where q, k and v alternate."""
        ranges, shape, inside, rest = [], [], [], iter(box)
        for dim in self._sides[0]:
            sizes, cuts = [self._size(token) for token in dim], [next(rest) for _ in dim]
            strides = [math.prod(sizes[number + 1 :]) for number in range(len(sizes))]
            cut = next((number for number, (start, stop) in enumerate(cuts) if stop - start > 1), len(cuts) - 1)
            first = sum(start * stride for (start, _), stride in zip(cuts[: cut + 1], strides, strict=False))
            count = cuts[cut][1] - cuts[cut][0]
            ranges.append((first, first + count * strides[cut]))
            shape += [1] * cut + [count, *sizes[cut + 1 :]]
            inside += [slice(None)] * (cut + 1) + [slice(*each) for each in cuts[cut + 1 :]]
        tokens = itertools.chain(*self._sides[0])
        kept = [stop - start for (start, stop), token in zip(box, tokens, strict=True) if _letter(token)]
        return tensor.read(ranges).reshape(shape)[tuple(inside)].reshape(kept)

    def write(self, tensor: NewTensor, ranges: Ranges, values: Float[np.ndarray, "..."]) -> None:
        """Write a slice of our array; padding of the vocabulary is left out."""
        for part in self.parts(ranges):
            letters = values[part.ours].reshape(part.letters_shape).transpose(np.argsort(self._order))
            tensor.write(self.view, part.box, letters)

    @cached_property
    def _order(self) -> list[int]:
        """For each of our letters, its place among the letters of the file."""
        letters = [_letter(token) for token in itertools.chain(*self._sides[0]) if _letter(token)]
        return [letters.index(letter) for letter in itertools.chain(*self._sides[1])]

    def parts(self, ranges: Ranges) -> list[Part]:
        """The parts of a slice of our array."""
        left, right = self._sides
        per_dim = [_boxes([self._size(letter) for letter in dim], *r) for dim, r in zip(right, ranges, strict=True)]
        parts = []
        for combination in itertools.product(*per_dim):
            letters = dict(zip(itertools.chain(*right), itertools.chain(*[p for p, _ in combination]), strict=True))
            box = [self._range(token, letters) for token in itertools.chain(*left)]
            shape = tuple(stop - start for start, stop in letters.values())
            parts.append(Part(box, tuple(where for _, where in combination), shape))
        return parts

    def _range(self, token: str, letters: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
        """The range of a dim of the file's tensor, from the ranges of its letters."""
        number, _, parts = token.partition("/")
        letter = _letter(token)
        if letter is None:
            return int(number), int(number) + 1
        before = sum(self._sizes(parts)[: int(number)]) if parts else 0
        start, stop = letters[letter]
        return before + start, before + stop


def _letter(token: str) -> str | None:
    """The letter that a dim of the file's tensor has; None for one of equal parts."""
    number, _, parts = token.partition("/")
    if "+" in parts:
        return parts.split("+")[int(number)]
    return None if parts else token


def _boxes(sizes: list[int], start: int, stop: int) -> list[tuple[list[tuple[int, int]], slice]]:
    """[start, stop) of a dim that is one letter, or two of which the second varies faster: (ranges of the letters,
    the place in the slice) of each rectangular box; nothing beyond the dim."""
    end = min(stop, math.prod(sizes))
    if len(sizes) == 1:
        return [([(start, end)], slice(0, end - start))] if start < end else []
    _, inner = sizes
    boxes, at = [], start
    while at < end:
        row, within = divmod(at, inner)
        rows = (end - at) // inner if within == 0 else 0
        upto = at + rows * inner if rows else min(end, (row + 1) * inner)
        ranges = [(row, row + rows), (0, inner)] if rows else [(row, row + 1), (within, within + upto - at)]
        boxes.append((ranges, slice(at - start, upto - start)))
        at = upto
    return boxes
