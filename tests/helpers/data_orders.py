"""The data order of token files, without the rest of a run."""

from fractions import Fraction

from shmap_tp.data.order import DataOrder, source_key
from shmap_tp.data.token_files import TokenFile


def order_of(*files: TokenFile, seed: int = 0, shares: dict[int, list[Fraction]] | None = None) -> DataOrder:
    """The data order of a run of `seed` on `files`, which have the `shares` from each sample on; or of one file."""
    keys = [source_key(seed, file.sha256) for file in files]
    return DataOrder([len(file) for file in files], keys, shares or {0: [Fraction(1)]})
