"""Whole documents in rows of a fixed length: best-fit decreasing, so that only documents longer than a row are cut.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 3, https://arxiv.org/abs/2404.10830

A document is placed into the row with the least room that suffices, the longest documents first.  One longer than a row
fills rows of its own, the last of which has room for others.  What stays free at the end of a row is filled.  Rows are
shuffled, since those of long documents come first: a part of them is then a sample of all.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer


def pack(documents: Sequence[Integer[np.ndarray, " _"]], row: int, filling: int) -> Integer[np.ndarray, "rows row"]:
    """At least one document, each of at least one token, in rows of `row` tokens.  A row begins with a document, or
    goes on with the one that ends the row before it."""
    rows: list[list[np.ndarray]] = []
    firsts: list[int] = []  # rows that go on with no document of the row before
    with_room: dict[int, list[int]] = defaultdict(list)  # free tokens -> rows
    rooms = 0  # bit i: there are rows with i free tokens
    for number in sorted(range(len(documents)), key=lambda number: -len(documents[number])):
        document = documents[number]
        if len(document) <= row and (enough := rooms >> len(document)):
            room = len(document) + (enough & -enough).bit_length() - 1
            target = with_room[room].pop()
            rooms &= ~(0 if with_room[room] else 1 << room)
            rows[target].append(document)
        else:
            firsts.append(len(rows))
            rows += [[part] for part in np.split(document, range(row, len(document), row))]
            target, room = len(rows) - 1, row * -(-len(document) // row)
        if left := room - len(document):
            with_room[left].append(target)
            rooms |= 1 << left
    groups = np.split(np.arange(len(rows)), firsts[1:])
    packed = np.full((len(rows), row), filling, documents[0].dtype)
    order = np.concatenate([groups[number] for number in np.random.default_rng(0).permutation(len(groups))])
    for place, number in zip(packed, order, strict=True):
        tokens = np.concatenate(rows[number])
        place[: len(tokens)] = tokens
    return packed
