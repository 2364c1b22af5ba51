"""A directory in the place of Google's buckets, in this process or in others, and data sets of any size in it."""

import hashlib
import json
import os
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from shmap_tp.data.metadata import DTYPES, META, SPLITS, TOKENIZER
from tests.helpers.paths import ROOT

REGISTER = (
    "import fsspec, tests.helpers.buckets as buckets\nfsspec.register_implementation('gs', buckets.Bucket, True)\n"
)


class Bucket(LocalFileSystem):
    """gs://BUCKET/PATH is $BUCKETS/BUCKET/PATH."""

    protocol = "gs"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        path = os.fspath(path)
        return os.environ["BUCKETS"] + "/" + path[5:].rstrip("/") if path.startswith("gs://") else path


def bucket_environment(directory: Path) -> dict[str, str]:
    """Environment variables with which processes have the buckets in `directory`/buckets, and find this project."""
    site = directory / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(REGISTER)
    return {"BUCKETS": str(directory / "buckets"), "PYTHONPATH": f"{ROOT}:{site}"}


def write_data_set(directory: Path, *, vocabulary: int, train: int, validation: int = 10**7, **more: str) -> None:
    """Token files with these numbers of tokens, all zero, which take no space, a tokenizer.json that is none, and
    meta.json; `more` of its keys."""
    directory.mkdir(parents=True)
    dtype = "uint16" if vocabulary <= 2**16 else "uint32"
    tokens = {"train": train, "validation": validation}
    meta = {"dtype": dtype, "vocabulary": vocabulary, "tokens": tokens, "sha256": dict.fromkeys(SPLITS, "0")}
    (directory / TOKENIZER).write_bytes(b"{}")
    meta |= {"tokenizer_sha256": hashlib.sha256(b"{}").hexdigest(), "end_of_text": 0}
    (directory / META).write_text(json.dumps(meta | more))
    for split, count in tokens.items():
        with (directory / f"{split}.bin").open("wb") as file:
            file.truncate(count * DTYPES[dtype].itemsize)
