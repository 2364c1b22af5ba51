"""Whole documents in rows of a fixed length: best-fit decreasing, so that only documents longer than a row are cut.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 3, https://arxiv.org/abs/2404.10830

A document is placed into the row with the least room that suffices, the longest documents first.  One longer than a row
fills rows of its own, the last of which has room for others.  What stays free at the end of a row is filled.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt


def pack(documents: Sequence[UInt[np.ndarray, " _"]], row: int, filling: int) -> UInt[np.ndarray, "rows row"]:
    """Documents of at least one token, in rows of `row` tokens; a row begins with a document, or goes on with the one
    that ends the row before it."""
    rows: list[list[np.ndarray]] = []
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
            rows += [[part] for part in np.split(document, range(row, len(document), row))]
            target, room = len(rows) - 1, row * -(-len(document) // row)
        if left := room - len(document):
            with_room[left].append(target)
            rooms |= 1 << left
    packed = np.full((len(rows), row), filling, documents[0].dtype if documents else np.uint16)
    for place, parts in zip(packed, rows, strict=True):
        tokens = np.concatenate(parts)
        place[: len(tokens)] = tokens
    return packed
