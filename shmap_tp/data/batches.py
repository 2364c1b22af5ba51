"""The sequences that each training step reads, and the step's batch as an array on the devices.

n sequences in a file, b sequences in one microbatch, T context.

The data order is a function of (seed, step) and of nothing else: sample i = step * batch + row is a sequence of one of
the sources (`order`; data.dir is the only one unless there are data.sources).  It depends on neither the hosts nor
the mesh, so a run can be resumed on any machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Int32

from shmap_tp.config.choices import Documents
from shmap_tp.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from shmap_tp.config.sources import describe_shares, each_source, first_source, phases
from shmap_tp.data import metadata
from shmap_tp.data.chat_template import ChatTemplate
from shmap_tp.data.device_batch import ReadAhead, host_shards, on_devices
from shmap_tp.data.location import Bucket, prepared_directory
from shmap_tp.data.metadata import COMPANIONS, META, SPLITS, TEMPLATE, TOKENIZER, Meta
from shmap_tp.data.order import ORDER, DataOrder, source_key
from shmap_tp.data.subwords import has_sha256
from shmap_tp.data.text_directory import TextDirectory
from shmap_tp.data.token_files import TokenFile, data_identity
from shmap_tp.data.tokenizer import Bytes, TextBytes, Tokenizer
from shmap_tp.errors import UserError
from shmap_tp.layers.context import IGNORE
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.files import file_size, read_file
from shmap_tp.runtime.workers import in_background

Companions = dict[str, bytes]
"""The files beside meta.json that belong to a run, by name."""


def training_rows(
    files: Sequence[TokenFile], order: DataOrder, step: int, batch: int, first: int, last: int
) -> Int32[np.ndarray, "rows tokens"]:
    """Rows first .. last - 1 of the `batch` rows of a step, [last - first, T + 1].  Steps are counted from 0.

    `files` are those of the sources, in the order that `order` knows; if one is in a bucket, they are read at the same
    time.
    """
    assert 0 <= first <= last <= batch, (first, last, batch)
    source, sequence = order(step * batch + first, step * batch + last)
    if len(files) == 1:
        return files[0].read(sequence)
    rows = np.empty((last - first, files[0].context + 1), np.int32)
    reads = {number: partial(files[number].read, sequence[source == number]) for number in np.unique(source)}
    remote = any(files[number].is_remote for number in reads)
    parts = [in_background(read).result for read in reads.values()] if remote else reads.values()
    for number, part in zip(reads, parts, strict=True):
        rows[source == number] = part()
    return rows


def validation_rows(file: TokenFile, index: int, batch: int, first: int, last: int) -> Int32[np.ndarray, "rows tokens"]:
    """Rows first .. last - 1 of validation batch `index`, [last - first, T + 1], in file order.

    Rows without targets fill the last batch.
    """
    assert 0 <= first <= last <= batch and 0 <= index * batch < len(file), (index, batch, first, last)
    numbers = np.arange(index * batch + first, index * batch + last)
    rows = file.read(numbers[numbers < len(file)])
    return np.pad(rows, [(0, len(numbers) - len(rows)), (0, 0)], constant_values=IGNORE)


def open_data(data: DataConfig, model: ModelConfig, splits: Sequence[str]) -> tuple[list[TokenFile], Meta, Companions]:
    """(the token files of `splits` for `model`, meta.json, the files beside it that belong to the run)."""
    sizes = {"context": model.context, "vocabulary": model.vocabulary}
    place, meta, companions = _open_meta(data, model)
    check_rows(meta, data, model)
    return [TokenFile(place, split, meta, **sizes) for split in splits], meta, companions


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


def check_pairs(meta: Meta, data: DataConfig, train: TrainConfig) -> None:
    """Raise UserError if the data has preference pairs and the objective does not read them, or the other way round."""
    if (meta.pairs is None) == (train.dpo_beta is None):
        return
    if meta.pairs is None:
        raise UserError(
            f"train.dpo_beta={train.dpo_beta} needs preference pairs, but {data.dir} has none; prepare some with "
            f"--preferences, or use train.dpo_beta=null"
        )
    raise UserError(
        f"{data.dir} has preference pairs, whose rejected answers are not to be learned; use train.dpo_beta=0.1, or "
        f"prepare conversations with --chat"
    )


def _open_meta(data: DataConfig, model: ModelConfig) -> tuple[Path | Bucket, Meta, Companions]:
    """(where the token files are, meta.json, the files beside it that belong to the run)."""
    if "://" in data.dir and data.cache is None:
        bucket = Bucket(data, model.from_pretrained)
        found = {name: b"".join(bucket.chunks(name)) for name in bucket.files.keys() & {META, *COMPANIONS}}
        meta = metadata.parse_meta(found.pop(META), f"{data.dir}/{META}")
        return bucket, meta, metadata.own_companions(found, meta, data.dir)
    directory = prepared_directory(data, model.from_pretrained)
    meta = metadata.read_meta(directory)
    return directory, meta, metadata.read_companions(directory, meta)


def isolating_token(data: DataConfig, model: ModelConfig) -> int | None:
    """The id that ends each document of the data, where documents are isolated; None where they are joined.

    Raises UserError if there is no data, or meta.json does not state the id.
    """
    data = first_source(data)
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


def data_warning(data: DataConfig, model: ModelConfig, meta: Meta, largest: int | None = None) -> str | None:
    """A line if data.dir is probably not the data of the model, else None.

    It is not if it was tokenized with another tokenizer than model.from_pretrained has, or if the model has at least
    twice its vocabulary.  `meta` is its meta.json, `largest` its largest id, if that is known.
    """
    origin = model.from_pretrained
    own = Path(origin or "") / TOKENIZER
    known = origin is not None and (meta.tokenizer_sha256 or meta.tokenizer == Bytes.name)
    if known and file_size(own) is not None:
        content, is_bytes = read_file(own), meta.tokenizer == Bytes.name
        if not (content == Bytes().file_for_export() if is_bytes else has_sha256(content, meta.tokenizer_sha256)):
            return (
                f"warning: {data.dir} was tokenized with another tokenizer than {own} "
                f"({meta.tokenizer}); prepare it with --tokenizer {origin}, if the model is to read it"
            )
    vocabulary = meta.vocabulary or (largest or 0) + 1
    if vocabulary > 1 and model.vocabulary >= 2 * vocabulary:
        tokenizer = f", tokenizer {meta.tokenizer}" if meta.tokenizer else ""
        return (
            f"warning: {data.dir} has a vocabulary of {vocabulary}{tokenizer}, but model.vocabulary="
            f"{model.vocabulary} (model {model.name}): is this the data of that model?"
        )
    return None


TOKENIZER_FACTS = ("tokenizer", "tokenizer_sha256", "vocabulary", "end_of_text")
"""What meta.json states of a tokenizer, by which tokens have a meaning."""


@dataclass(frozen=True)
class DataSource:
    """One of the directories that a run reads: its token files, and what meta.json says."""

    data: DataConfig
    """Its settings alone."""
    train: TokenFile
    validation: TokenFile
    meta: Meta
    companions: dict[str, bytes]
    """The files beside it that belong to the run, by name."""


def check_alike(metas: dict[str, Meta]) -> None:
    """Raise UserError if the meta.json of a source, by name, states another tokenizer than that of the first."""
    for name, fact in ((name, fact) for name in metas for fact in TOKENIZER_FACTS):
        first = next(iter(metas))
        here, there = (getattr(metas[each], fact) for each in (name, first))
        if here != there:
            raise UserError(
                f"data.sources.{name} has {fact} {here}, and data.sources.{first} has {there}; prepare both with the "
                f"same tokenizer{' and the same --end-of-text' if fact == 'end_of_text' else ''}, or correct meta.json"
            )


def open_sources(config: Config) -> dict[str, DataSource]:
    """The sources of a run by name; data.dir has the name "".

    Raises UserError if one cannot be used, or two cannot be mixed: they have different tokenizers, or the same tokens.
    """
    found: dict[str, DataSource] = {}
    for name, data in each_source(config.data).items():
        (train, validation), meta, companions = open_data(data, config.model, SPLITS)
        if warning := data_warning(data, config.model, meta, max(train.largest, validation.largest)):
            print_on_process_0(warning)
        check_pairs(meta, data, config.train)
        found[name] = DataSource(data, train, validation, meta, companions)
    check_alike({name: source.meta for name, source in found.items()})
    by_content: dict[str, str] = {}
    for name, source in found.items():
        if (same := by_content.setdefault(source.train.sha256, name)) != name:
            raise UserError(f"data.sources.{same} and data.sources.{name} have the same train.bin; leave one out")
    return found


class Batches:
    """The training and validation batches of one run, on its devices."""

    identity: dict
    """Everything that determines which tokens each step reads; see `data_identity`.  With data.sources, `sources` has
    the files of each, and `phases` their shares by the first step, in place of the files of data.dir."""
    validation_counts: dict[str, int]
    """Number of validation batches of each source; data.dir is the source ""."""
    weights: dict[str, float]
    """Share of each source in the last phase, by which its validation loss counts in that of the mixture."""
    companions: dict[str, bytes]
    """The files of the tokenizer and the chat template beside the data, by name; of several sources those of the first
    that has each."""
    sources_shape: jax.ShapeDtypeStruct | None
    """The shape of `row_sources`; None without data.sources."""

    def __init__(self, config: Config, tokens: jax.ShapeDtypeStruct):
        """Open and check all token files.  `tokens` has the shape and sharding of a step's batch, [A, b, T + 1]."""
        self._sources, self._phases = open_sources(config), phases(config.data)
        self._batch, self._tokens = config.train.batch, tokens
        sources = jax.ShapeDtypeStruct((*tokens.shape[:2], 1), np.int32, sharding=tokens.sharding)
        self.sources_shape = sources if config.data.sources else None
        self._names = sorted(self._sources, key=lambda name: self._sources[name].train.sha256)  # names may change
        self._files = [self._sources[name].train for name in self._names]
        self._order = DataOrder(
            [len(file) for file in self._files],
            [source_key(config.run.seed, file.sha256) for file in self._files],
            {
                phase.first * self._batch: [phase.shares.get(name, Fraction(0)) for name in self._names]
                for phase in self._phases
            },
        )
        first = next(iter(self._sources.values()))
        self.companions = {}
        for each in self._sources.values():
            self.companions = each.companions | self.companions
        self._isolated = isolating_id(first.meta, first.data, config.model)
        self.identity = self._identity(config)
        self.validation_counts = {  # the last one may not be full
            name: min(config.evaluate.batches, -(-len(source.validation) // self._batch))
            for name, source in self._sources.items()
        }
        self.weights = {name: float(self._phases[-1].shares.get(name, 0)) for name in self._sources}
        self._meta, self._directory = first.meta, first.data.dir
        self._training_shards = self._shards(self._training_rows, config.train.steps)
        self._validation_shards = {
            name: self._shards(partial(self._validation_rows, name), count)
            for name, count in self.validation_counts.items()
        }
        for line in self._described(config.train.steps) if config.data.sources else ():
            print_on_process_0(line)

    def text_tokenizer(self) -> Tokenizer:
        """Text to ids of this data and back.  Raises UserError if its tokenizer is not known."""
        return TextDirectory(self.companions, self._directory).tokenizer_of_data(self._meta)

    def chat_template(self) -> ChatTemplate | None:
        """The template of the conversations, if the data is some.  Raises UserError if it cannot be used."""
        return TextDirectory(self.companions, self._directory).template() if TEMPLATE in self.companions else None

    def validation_bytes(self, tokenizer: Tokenizer) -> dict[str, int]:
        """UTF-8 bytes of the text of all targets of an evaluation that count, by source."""
        count = TextBytes(tokenizer, self._meta.end_of_text, self._isolated)
        return {
            name: sum(count(self._validation_rows(name, i, 0, self._batch)) for i in range(batches))
            for name, batches in self.validation_counts.items()
        }

    def sequences(self, step: int) -> list[int] | list[str]:
        """Indices of the sequences of train.bin that a step reads, with data.sources each after the name of its source.
        Steps are counted from 0."""
        source, sequence = self._order(step * self._batch, (step + 1) * self._batch)
        if self._names == [""]:
            return sequence.tolist()
        return [f"{self._names[s]} {i}" for s, i in zip(source, sequence, strict=True)]

    def training(self, step: int) -> Int32[jax.Array, "microbatches b tokens"]:
        """The batch of a step.  Steps are counted from 0."""
        return on_devices(self._training_shards(step), self._tokens.sharding, self._tokens.shape)

    def row_sources(self, step: int) -> Int32[jax.Array, "microbatches b 1"] | None:
        """The source of each row of a step, by its place among the names in order; None without data.sources."""
        if self.sources_shape is None:
            return None
        numbers = np.array([[*self._sources].index(name) for name in self._names], np.int32)

        def rows(first: int, last: int) -> Int32[np.ndarray, "rows 1"]:
            source, _ = self._order(step * self._batch + first, step * self._batch + last)
            return numbers[source][:, None]

        place = self.sources_shape.sharding, self.sources_shape.shape
        return on_devices(host_shards(rows, *place), *place)

    def validation(self, index: int, source: str = "") -> Int32[jax.Array, "microbatches b tokens"]:
        """Validation batch `index` of a source: the same sequences in every evaluation."""
        return on_devices(self._validation_shards[source](index), self._tokens.sharding, self._tokens.shape)

    def _training_rows(self, step: int, first: int, last: int) -> Int32[np.ndarray, "rows tokens"]:
        return training_rows(self._files, self._order, step, self._batch, first, last)

    def _validation_rows(self, source: str, index: int, first: int, last: int) -> Int32[np.ndarray, "rows tokens"]:
        return validation_rows(self._sources[source].validation, index, self._batch, first, last)

    def _identity(self, config: Config) -> dict:
        order = {"seed": config.run.seed, "batch": self._batch, "isolated": self._isolated}
        each = {
            name: data_identity(source.train, source.validation, source.meta, **order) | {"order": ORDER}
            for name, source in self._sources.items()
        }
        if "" in each:
            return each[""]
        common = {key: value for key, value in next(iter(each.values())).items() if key not in SPLITS}
        shares = {str(each.first): {name: str(share) for name, share in each.shares.items()} for each in self._phases}
        files = {name: {split: identity[split] for split in SPLITS} for name, identity in each.items()}
        return common | {"sources": files, "phases": shares}

    def _described(self, steps: int) -> list[str]:
        """A line for each source: its shares, and how many epochs of it a run of `steps` steps reads."""
        read, lines = dict(zip(self._names, self._order.counts(steps * self._batch), strict=True)), []
        for name, source in self._sources.items():
            epochs = read[name] / len(source.train)
            lines.append(
                f"source {name} ({source.data.dir}): {describe_shares(name, self._phases, steps)}; "
                f"{f'{epochs:,.2f}' if epochs > 1 else f'{epochs:.2g}'} epochs of its {len(source.train):,} sequences "
                f"in {steps:,} steps"
            )
        return lines

    def _shards(self, rows: Callable[[int, int, int], np.ndarray], count: int) -> Callable[[int], list[np.ndarray]]:
        """`host_shards` of batch 0 .. `count` - 1, a function of its number; `rows(number, first, last)` are its rows
        first .. last - 1.  Where the data is in a bucket, the next ones are read early."""
        remote = any(file.is_remote for file in self._files)

        def read(number: int) -> list[np.ndarray]:
            return host_shards(partial(rows, number), self._tokens.sharding, self._tokens.shape, concurrently=remote)

        return ReadAhead(read, count) if remote else read
