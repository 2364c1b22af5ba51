"""Columns of text, and rows, in Parquet and Arrow files, by the library pyarrow."""

from collections.abc import Callable, Iterator
from io import SEEK_END, IOBase
from typing import Any

from shmap_tp.errors import UserError, first_line, shown

TABLES = (".parquet", ".arrow")
_ROWS, _BYTES = 1 << 10, 1 << 22  # that are read at a time: so many rows, or fewer that are so large
_BUFFER = 1 << 20  # bytes of a column that are read at a time


def read_table(stream: IOBase, path: str, field: str, place: str) -> Iterator[tuple[list[str], float]]:
    """(texts of some rows, which share of the file they are), in the order of the rows.

    `place` is the file in messages.  Raises UserError as `_batches` does, or if the column `field` is not there, is no
    text, or has a null.
    """

    def texts(batch: Any, first: int) -> list[str]:
        column = batch.column(field)
        if column.null_count:
            number = first + column.is_null().index(True).as_py()
            raise UserError(f"{place}, row {number}: no text in the column {field!r}, but null; remove the row")
        return column.to_pylist()

    return _batches(stream, path, field, place, texts)


def read_rows(stream: IOBase, path: str, place: str) -> Iterator[dict[str, Any]]:
    """The rows, by their columns, without what is null.  Arguments and errors as of `read_table`."""
    for rows, _ in _batches(stream, path, None, place, lambda batch, _: batch.to_pylist()):
        yield from map(_without_nulls, rows)


def _without_nulls(value: Any) -> Any:
    """A table has every field of every record; one that a record lacks is null."""
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value


def _batches(
    stream: IOBase, path: str, field: str | None, place: str, convert: Callable[[Any, int], list[Any]]
) -> Iterator[tuple[list[Any], float]]:
    """(`convert` of some rows and the number of the first, which share of the file they are); `field` is the column
    that is needed, None for all.

    Raises UserError if pyarrow is not there, the file is damaged, or has no such column of text.
    """
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{place} needs `pyarrow`: pip install -e '.[data]'") from None
    row = 1
    try:
        for batch, share in _read(stream, path.endswith(".parquet"), field, place):
            yield convert(batch, row), share
            row += len(batch)
    except UnicodeDecodeError as error:
        raise UserError(f"{place}, after row {row}: {first_line(error)}; write the file again") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{place}, after row {row - 1}: damaged: {shown(first_line(error))}; copy it again") from None


def _read(stream: IOBase, parquet: bool, field: str | None, place: str) -> Iterator[tuple[Any, float]]:
    """As `_batches`, with the errors of the library."""
    import pyarrow

    if parquet:
        from pyarrow.parquet import ParquetFile

        file = ParquetFile(stream, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True)
        _check_column(file.schema_arrow, field, place)
        parts, count = file.metadata, file.metadata.num_rows
        size = sum(parts.row_group(number).total_byte_size for number in range(parts.num_row_groups))
        columns = None if field is None else [field]
        for batch in file.iter_batches(max(1, min(_ROWS, _BYTES * count // max(size, 1))), columns=columns):
            yield batch, len(batch) / count
        return
    size, begin = stream.seek(0, SEEK_END), 0
    stream.seek(0)
    random_access = stream.read(6) == b"ARROW1"
    stream.seek(0)
    file = (pyarrow.ipc.open_file if random_access else pyarrow.ipc.open_stream)(stream)
    _check_column(file.schema, field, place)
    for batch in map(file.get_batch, range(file.num_record_batches)) if random_access else file:
        yield batch, (stream.tell() - begin) / size
        begin = stream.tell()


def _check_column(schema: Any, field: str | None, place: str) -> None:
    """Raise UserError unless `field` is a column of text, or None."""
    from pyarrow import types

    if field is None:
        return
    if schema.names.count(field) != 1:
        raise UserError(f"{place}: no column {field!r} (columns: {', '.join(schema.names)}); set it with --field")
    found = schema.field(field).type
    text = found.value_type if types.is_dictionary(found) else found
    if not (types.is_string(text) or types.is_large_string(text) or types.is_string_view(text)):
        raise UserError(f"{place}: the column {field!r} is of type {found}, not text; name another with --field")
