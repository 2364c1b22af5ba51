"""Writes the token files of a source: train.bin, validation.bin, meta.json and a copy of the tokenizer.

Each document is followed by an end-of-text token; meta.json describes the files, and has the sha256 of tokenizer.json.
Conversations, whose tokens do not all count as targets, have a .counted file beside each .bin: a bit for each token.
The same text always gives the same bytes.

A preparation of data/x owns three hidden paths beside it:

    .x.lock       locked for as long as the preparation lives; another one waits
    .x.partial    what it has written, and finished parts of it, from which a preparation that was killed goes on;
                  renamed to the target when it is complete
    .x.replaced   the data that it replaces, between two renames

The system releases a lock when its process ends, however it ends.  So what is there when the lock is taken is of a
preparation that was killed, and is removed, but for parts with which the next one goes on.

With `--pack` whole documents are put into rows of a fixed length by best-fit decreasing, so that only documents longer
than a row are cut: a document is placed into the row with the least room that suffices, the longest documents first.
One longer than a row fills rows of its own, the last of which has room for others.  What stays free at the end of a row
is filled.  Rows are shuffled, since those of long documents come first: a part of them is then a sample of all.
Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 3, https://arxiv.org/abs/2404.10830
"""

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Integer

from shmap_tp.config.schema import DataConfig
from shmap_tp.config.values import check_path
from shmap_tp.data import text_sources
from shmap_tp.data.conversations import ChatSource
from shmap_tp.data.location import FILES, stdlib_meta
from shmap_tp.data.metadata import DTYPES, META, SPLITS
from shmap_tp.data.subwords import train_tokenizer
from shmap_tp.data.tokenizer import Bytes, Tokenizer
from shmap_tp.data.tokenizing import FIRST_PART, DocumentSource, id_dtype, parts_key, tokenized
from shmap_tp.errors import LostProcessError, UserError, shown
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.files import file_size, locked, read_file, writing_output

_PACKED = 1 << 24  # tokens that are packed at a time


class HashedFile:
    """A file that is appended to until `closing` closes it, and its sha256."""

    def __init__(self, path: Path, closing: ExitStack):
        self._file, self._digest = closing.enter_context(path.open("xb")), hashlib.sha256()

    def append(self, content: np.ndarray) -> None:
        self._digest.update(content)
        self._file.write(content)

    def sha256(self) -> str:
        """sha256 of what was written."""
        return self._digest.hexdigest()


class TokenWriter:
    """Appends documents to one .bin file, and counts its tokens; with `marked`, what counts to a .counted file.

    With `row`, whole documents are put into rows of so many tokens (`pack`), some millions of tokens at a time.
    The token after each row, which is its last target, is the first of the next one, or an end of text after all.
    """

    def __init__(
        self, path: Path, closing: ExitStack, dtype: np.dtype, end_of_text: int, row: int | None, *, marked: bool
    ):
        self._dtype, self._row, self._filling = dtype, row, ~end_of_text if marked else end_of_text
        self.ids = HashedFile(path, closing)
        self.bits = HashedFile(path.with_suffix(".counted"), closing) if marked else None
        self._documents, self._waiting, self._begun = list[np.ndarray](), 0, np.zeros(0, bool)
        self.tokens, self.counted, self.of_documents, self.documents = 0, 0, 0, 0
        """Tokens in the file; those that count as targets; those that are no filling; number of documents."""

    def write(self, document: Integer[np.ndarray, " _"]) -> None:
        """Append one document, whose last token is the end of text."""
        self.of_documents += len(document)
        self.documents += 1
        if self._row is None:
            return self._append(document)
        self._documents.append(document.astype(np.int32))
        self._waiting += len(document)
        if self._waiting >= _PACKED:
            self._pack()
        return None

    def finish(self) -> None:
        """Append what is left when all documents are written."""
        if self._documents:
            self._pack()
        if self._row is not None and self.tokens:
            self._append(np.array([self._filling]))
        if self.bits is not None:
            self.bits.append(np.packbits(self._begun, bitorder="little"))

    def _pack(self) -> None:
        self._append(pack(self._documents, self._row, self._filling).reshape(-1))
        self._documents, self._waiting = [], 0

    def _append(self, tokens: Integer[np.ndarray, " _"]) -> None:
        if self.bits is not None:
            counted = tokens >= 0
            self._append_bits(counted)
            self.counted += int(counted.sum())
            tokens = np.where(counted, tokens, ~tokens)
        self.ids.append(tokens.astype(self._dtype))
        self.tokens += len(tokens)

    def _append_bits(self, counted: Bool[np.ndarray, " _"]) -> None:
        """Whole bytes; up to 7 bits wait for the next ones."""
        bits = np.concatenate([self._begun, counted])
        whole = len(bits) // 8 * 8
        self.bits.append(np.packbits(bits[:whole], bitorder="little"))
        self._begun = bits[whole:]


def prepare(
    source: DocumentSource,
    tokenizer: Tokenizer,
    out: Path | str,
    *,
    row: int | None = None,
    overwrite: bool = False,
    key: str = "--out",
    workers: int = 1,
) -> dict:
    """Write the files of `source` to the directory `out`; return what meta.json holds.

    With `row` whole documents are packed into rows of so many tokens.  `workers` processes tokenize text; the files are
    the same whatever their number.  What a killed preparation of the same files with the same tokenizer has finished is
    not done again; what others left behind is removed.  `key` is the option by which the user gave `out`, for messages.
    Raises `UserError` if `out` already holds files (with `overwrite`: files other than prepared data), cannot be
    written, or if a split has no document.
    """
    target = check_out(out, overwrite, key)
    name = parts_key(source, tokenizer)
    with writing_output(f"{key} {shown(out)}"), staging(target, overwrite, name) as directory:
        parts = None if name is None else directory / name
        with closing(tokenized(source, tokenizer, workers, parts)) as documents:
            meta = _write_splits(source, documents, tokenizer, directory, row)
        if parts is not None:
            shutil.rmtree(parts, ignore_errors=True)
        for name, content in source.companions(tokenizer).items():
            (directory / name).write_bytes(content)
        (directory / META).write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def check_out(out: Path | str, overwrite: bool, key: str = "--out") -> Path:
    """The real path of `out`, where data can be prepared; `key` and errors as of `prepare`."""
    if "://" in str(out):
        raise UserError(f"{key} {out} is a URL, but {key} must name a directory; copy it there when it is prepared")
    check_path(key, str(out), ())
    with writing_output(f"{key} {shown(out)}"):
        target = Path(os.path.realpath(out))
        recover(target)
        _check_free(target, overwrite, key)
        return target


def prepare_missing(data: DataConfig) -> None:
    """Prepare data.dir if it is empty and data.source names what this machine has; safe in parallel processes."""
    if (planned := stdlib_meta(data)) and file_size(Path(data.dir) / "train.bin") is None:
        print_on_process_0(f"preparing {data.dir} from the Python standard library of this machine ...")
        prepare_stdlib(data.dir, planned.vocabulary)


def prepare_stdlib(out: Path | str, vocabulary: int = Bytes.vocabulary) -> dict:
    """Prepare the Python standard library in the data.dir `out` unless it is there, as bytes, or with a tokenizer of
    `vocabulary` ids that is trained on it; safe in parallel processes."""
    as_bytes = vocabulary == Bytes.vocabulary
    try:
        tokenizer = Bytes() if as_bytes else train_tokenizer(text_sources.stdlib(), vocabulary)
        return prepare(text_sources.stdlib(), tokenizer, out, key="data.dir")
    except UserError:
        if file_size(meta := Path(out) / META) is None:
            raise
        return json.loads(read_file(meta))


def _write_splits(
    source: DocumentSource,
    documents: Iterable[tuple[str, Integer[np.ndarray, " _"]]],
    tokenizer: Tokenizer,
    directory: Path,
    row: int | None,
) -> dict:
    """Write both .bin files; return the contents of meta.json."""
    dtype = id_dtype(tokenizer)
    with ExitStack() as closing_files:
        given = closing_files, DTYPES[dtype], tokenizer.end_of_text, row
        writers = {s: TokenWriter(directory / f"{s}.bin", *given, marked=source.marked) for s in SPLITS}
        for split, document in documents:
            writers[split].write(document)
        for writer in writers.values():
            writer.finish()
    for split, writer in writers.items():
        if not writer.tokens:
            raise UserError(f"{source.name}: no text for {split}.bin; add documents, or choose another --validation")
    more = {} if row is None else {"row": row, "of_documents": {s: each.of_documents for s, each in writers.items()}}
    if source.marked:
        more["counted"] = {split: writer.bits.sha256() for split, writer in writers.items()}
        more["counted_tokens"] = {split: writer.counted for split, writer in writers.items()}
    if isinstance(source, ChatSource):
        more |= source.rendering
        if source.pairs:
            more["pairs"] = {split: writer.documents for split, writer in writers.items()}
    return {
        "vocabulary": tokenizer.vocabulary,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": None if tokenizer.json is None else hashlib.sha256(tokenizer.json).hexdigest(),
        "source": source.name,
        "end_of_text": tokenizer.end_of_text,
        "dtype": dtype,
        "tokens": {split: writer.tokens for split, writer in writers.items()},
        "sha256": {split: writer.ids.sha256() for split, writer in writers.items()},
    } | more


def _check_free(target: Path, overwrite: bool, key: str) -> None:
    """Raise `UserError` unless `target` is new or empty, or holds prepared data that may be replaced."""
    is_file = os.path.lexists(target) and not target.is_dir()
    existing = {path.name for path in target.iterdir()} if target.is_dir() else set()
    if is_file or (foreign := existing.difference(FILES)):
        holds = "" if is_file else f"holds {shown(min(foreign))}, which is not prepared data; choose another {key}"
        raise UserError(f"{target} {holds or f'is a file; {key} must name a directory'}")
    if existing and not overwrite:
        raise UserError(f"{target} already holds prepared data; choose another {key}, or replace it with --overwrite")


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


# The hidden directory


def has_parts(out: str) -> bool:
    """Whether an interrupted preparation of the directory `out` left parts."""
    return any(_beside(Path(os.path.realpath(out)), "partial").glob(FIRST_PART))


def recover(target: Path) -> None:
    """Remove what a killed preparation of `target` left, but for finished parts; data that it was replacing is put
    back.  One that is under way is waited for."""
    partial, replaced = _beside(target, "partial"), _beside(target, "replaced")
    if partial.is_dir() or replaced.is_dir():
        with locked(_beside(target, "lock")):
            _put_back(replaced, target)
            if not any(partial.glob(FIRST_PART)):
                shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def staging(target: Path, overwrite: bool, parts: str | None = None) -> Iterator[Path]:
    """An empty directory to write, which is renamed to `target` unless there is an error.

    What `target` held is deleted after the rename with `overwrite`; otherwise OSError is raised if it has become one.
    `target` is as it was after any error.  The directory has those finished `parts`, a name, that a killed preparation
    left; an interrupt, or the loss of a process, leaves them there.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    own = ""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(_beside(target, "lock")))
        except PermissionError:  # the lock is another user's, whose preparation may be under way
            raise
        except OSError:  # a file system without locks, where others may be under way
            own = f"{uuid.uuid4().hex}."
            _beside(target, "lock").unlink(missing_ok=True)
        partial, replaced, go_on = _beside(target, f"{own}partial"), _beside(target, f"{own}replaced"), False
        try:
            _put_back(replaced, target)
            partial.mkdir(exist_ok=True)
            _clear(partial, parts)
            if not overwrite and target.is_dir() and any(target.iterdir()):
                raise FileExistsError(errno.EEXIST, "it was prepared meanwhile")
            yield partial
            if overwrite and target.is_dir():
                target.rename(replaced)
            partial.rename(target)
        except (KeyboardInterrupt, LostProcessError):
            go_on = any(partial.glob(FIRST_PART))
            raise
        finally:
            _put_back(replaced, target)
            if go_on:
                _clear(partial, parts)
            else:
                shutil.rmtree(partial, ignore_errors=True)


def _beside(target: Path, ending: str) -> Path:
    return target.with_name(f".{target.name}.{ending}")


def _put_back(replaced: Path, target: Path) -> None:
    """Rename the replaced data back to `target`, or remove it if the new data got there."""
    if replaced.is_dir() and not target.exists():
        replaced.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def _clear(partial: Path, parts: str | None) -> None:
    """Remove what is there but for these parts."""
    for path in partial.iterdir():
        if path.is_file():
            path.unlink()
        elif path.name != parts:
            shutil.rmtree(path)
