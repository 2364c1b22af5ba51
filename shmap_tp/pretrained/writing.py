"""A Hugging Face directory written from parameters on any mesh, or from those of a checkpoint, piece by piece.

The space of the files is reserved first, with a place for every tensor.  Then each process writes the pieces that it
has into their byte ranges: nothing is gathered, and beside its shards a process holds a few pieces.  The
headers of the files and config.json are written last, and until then the directory has another name: what an export
that was killed leaves cannot be read as a model.
"""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jaxtyping import Float

from shmap_tp.config.choices import AdapterScale, Zero
from shmap_tp.config.schema import AdapterConfig, Config, ModelConfig
from shmap_tp.config.sources import first_source
from shmap_tp.data.metadata import GENERATION
from shmap_tp.data.text_directory import TextDirectory
from shmap_tp.data.tokenizer import Tokenizer
from shmap_tp.errors import StorageError, UserError
from shmap_tp.inference.text import tokenizer_of_checkpoint
from shmap_tp.model.adapters import merged, split_factors
from shmap_tp.model.sharded_model import held_in
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.parallel.partitioning import is_stacked
from shmap_tp.pretrained.configuration import Target, require_expressible, target_of
from shmap_tp.pretrained.family import TensorRow
from shmap_tp.pretrained.layout import PIECE_BYTES, Layout, Ranges, tensors_within
from shmap_tp.pretrained.peft import adapter_target
from shmap_tp.pretrained.reading import paths_of
from shmap_tp.pretrained.source import INDEX, Source
from shmap_tp.pretrained.start import recorded_base, recorded_source, restored_parameters, with_base_on_disk
from shmap_tp.pretrained.tensor_files import DTYPES, NewFile, pieces_of_array
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.run_lock import LOCK, lock_directories
from shmap_tp.training import checkpoint_files
from shmap_tp.training.components_file import recorded_parts
from shmap_tp.training.environment import compute_dtype
from shmap_tp.training.model_functions import build_model_functions

MAX_SHARD_BYTES = 5 * 10**9
"""The largest file that is written, unless a single tensor is larger: the default of transformers 4."""
OUTPUT_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}


Piece = tuple[str, Ranges, Float[np.ndarray, "..."]]
"""(path of a parameter, a box of it, its values)."""


@dataclass(frozen=True)
class Form:
    """How a model is written."""

    dtype: str = "float32"
    """One of `OUTPUT_DTYPES`."""
    merge: bool = False
    """The whole model is written of one with adapters, in place of these alone."""
    rslora: bool = False
    """As in `adapter_target`."""
    shard_bytes: int = MAX_SHARD_BYTES

    def check(self, adapter: AdapterConfig) -> None:
        """Raise UserError for a dtype that is not written, and an option without effect on a model with `adapter`."""
        if self.dtype not in OUTPUT_DTYPES:
            raise UserError(f"dtype {self.dtype} cannot be written; use one of {', '.join(OUTPUT_DTYPES)}")
        is_rslora = adapter.rank and adapter.scale == AdapterScale.sqrt_rank and not self.merge
        for name, fits, what in [
            ("merge", adapter.rank, "a model with adapters"),
            ("rslora", is_rslora, "adapters of model.adapter.scale=sqrt_rank that are written alone"),
        ]:
            if getattr(self, name) and not fits:
                raise UserError(f"{name} is for {what}; leave it out")


def save_model(
    out: Path,
    config: Config,
    parameters: Transformer,
    source: Source | None,
    form: Form = Form(),
    *,
    base: Mapping[str, str] | None = None,
    text: TextDirectory | None = None,
) -> None:
    """Write `parameters` to the new directory `out`; `source` is what they were read from, if they were, and `text` has
    else the files of the tokenizer (`target_of`).

    Adapters alone are written of a model that has some, with the `base` beside which they were trained, unless these
    are merged.  Every process of a mesh calls it and writes what it has, to a file system that all share.
    """
    form.check(config.model.adapter)
    target = target_of(config.model, source, text)
    if config.model.adapter.rank and form.merge:
        parameters = merged(parameters)
    elif config.model.adapter.rank:
        parameters, _ = split_factors(parameters)
        target = adapter_target(target, config.model, parameters, base, rslora=form.rslora)
    _save_parameters(out, target, config.model, paths_of(is_stacked(parameters)), pieces_of(parameters), form)


def export_checkpoint(directory: str, out: Path, step: int | None, form: Form = Form()) -> tuple[Path, str]:
    """Write a checkpoint of a run to the new directory `out`, one chunk of its files at a time; of a run with adapters
    these alone, or merged in float32 with the base on disk the whole model, which is then in memory.

    Returns (the checkpoint, what was written).
    Raises UserError if there is no such checkpoint or its model cannot be expressed, StorageError if the disk is full.
    """
    checkpoint = checkpoint_files.find_checkpoint(directory, step)
    config = checkpoint_files.saved_config(checkpoint)
    require_expressible(recorded_parts(checkpoint_files.read_facts(checkpoint)) or [], f"checkpoint {checkpoint}")
    config = replace(config, run=replace(config.run, components=None))
    one_device = replace(config.mesh, dp=1, mp=1, cp=1, ep=1, tile=None, slices=1, processes=1, zero=Zero.none)
    config = replace(config, mesh=one_device)
    mesh, dtype = make_mesh(config.mesh, jax.devices()[:1]), compute_dtype(config.train.precision)
    shapes = build_model_functions(config, mesh, dtype).shapes
    source = recorded_source(checkpoint, config)
    text = None if source else text_for_export(str(checkpoint), config)
    form.check(config.model.adapter)
    target, has_adapter = target_of(config.model, source, text), config.model.adapter.rank > 0
    if has_adapter:
        base = recorded_base(checkpoint)
        if form.merge:
            held = shapes if base is None else held_in(shapes, jnp.float32)
            parameters = with_base_on_disk(restored_parameters(checkpoint, shapes, held), config, base, shapes)
        else:
            held = shapes if base is None else split_factors(shapes)[0]
            parameters = checkpoint_files.restore_parameters(checkpoint, held)
        save_model(out, config, parameters, source, form, base=base, text=text)
    else:
        stacked, chunks = paths_of(is_stacked(shapes)), checkpoint_files.read_chunks(checkpoint, shapes)
        _save_parameters(out, target, config.model, stacked, chunks, form)
    kind = "an adapter of " if has_adapter and not form.merge else ""
    return Path(str(checkpoint)), kind + target.family.architecture


def text_for_export(checkpoint: str | None, config: Config, given: Tokenizer | None = None) -> TextDirectory | None:
    """The files of the `given` tokenizer of a model from nothing, or of its run's tokenizer.  Without one, None, and
    for a run a line that says so."""
    if given is not None:
        return TextDirectory({}, "").for_export(given, config.model.context)
    if checkpoint is None:
        return None
    try:
        tokenizer, text = tokenizer_of_checkpoint(checkpoint, first_source(config.data).dir)
        return text.for_export(tokenizer, config.model.context)
    except UserError as error:
        print_on_process_0(f"without the files of a tokenizer: {error}")
        return None


def _save_parameters(
    out: Path, target: Target, model: ModelConfig, stacked: Mapping[str, bool], pieces: Iterable[Piece], form: Form
) -> None:
    """Write the directory `out`, which does not exist or is empty; every process calls it.

    `stacked` has the path of every parameter, and whether it is stacked over layers; `pieces` are what this process
    writes of them.
    Raises UserError if `out` is not empty, StorageError if it cannot be written.
    """
    layouts, kind = target.family.layouts(model, stacked), OUTPUT_DTYPES[form.dtype]
    divided = _divide(_tensor_shapes(layouts, stacked, model), kind, form.shard_bytes, target.weights)
    temporary = out.parent / f"{out.name}.incomplete"  # which is renamed in the end
    files = [NewFile(temporary / name, shapes, kind) for name, shapes in divided.items()]
    places = {name: tensor for file in files for name, tensor in file.tensors.items()}

    def finish() -> None:
        for file in files:
            file.finish()
        _write_companions(temporary, target, files, form.dtype)

    in_process_0 = partial(_in_process_0, out)
    in_process_0(lambda: _check_directories(out, temporary))
    with lock_directories({"--out": str(temporary)}, in_process_0) as require_owner:
        try:
            in_process_0(lambda: _remove_files(temporary))
            in_process_0(lambda: [file.reserve() for file in files])
            with _all_or_none(out):
                for path, ranges, values in pieces:
                    row, layout = layouts[path]
                    divided = len(ranges) - len(layout.our_shape)
                    for place, index in tensors_within(ranges[:divided]):
                        layout.write(places[row.name(index)], ranges[divided:], values[place])
            in_process_0(require_owner)
            in_process_0(finish)
        except BaseException:
            if jax.process_index() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
    in_process_0(lambda: temporary.rename(out))


def pieces_of(parameters: Transformer) -> Iterator[Piece]:
    """What this process has of `parameters`; of replicas the first has it."""
    for path, array in paths_of(parameters).items():
        for shard in array.addressable_shards:
            if shard.replica_id:
                continue
            corner = [part.indices(size)[0] for part, size in zip(shard.index, array.shape, strict=True)]
            for first, size in pieces_of_array(shard.data.shape, array.dtype.itemsize, PIECE_BYTES):
                whole = size == shard.data.shape
                values = np.asarray(shard.data if whole else lax.dynamic_slice(shard.data, first, size))
                starts = [a + b for a, b in zip(corner, first, strict=True)]
                yield path, tuple((a, a + n) for a, n in zip(starts, size, strict=True)), values


def _tensor_shapes(
    layouts: Mapping[str, tuple[TensorRow, Layout]], stacked: Mapping[str, bool], model: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor by its name, those outside of the blocks first, then block by block."""
    found = []
    for path, (row, layout) in layouts.items():
        for index in np.ndindex(row.divided(model, stacked[path])):
            found.append((index[:1], row.name(index), layout.file_shape))
    return {name: shape for _, name, shape in sorted(found, key=lambda one: one[0])}


def _divide(
    shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, shard_bytes: int, name: str
) -> dict[str, dict[str, tuple[int, ...]]]:
    """The tensors of each file, by its name; `name` is that of a single one."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for tensor, shape in shapes.items():
        added = math.prod(shape) * dtype.itemsize
        if groups[-1] and size + added > shard_bytes:
            groups.append({})
            size = 0
        groups[-1][tensor] = shape
        size += added
    if len(groups) == 1:
        return {name: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_companions(directory: Path, target: Target, files: Sequence[NewFile], dtype: str) -> None:
    """config.json, the index if there are several files, generation_config.json and the tokenizer's files; or the
    documents of an adapter and the tokenizer's files, as PEFT's users expect them beside it."""
    if target.documents is not None:
        for name, document in target.documents.items():
            (directory / name).write_text(json.dumps(document, indent=2) + "\n")
        for name, content in target.companions.items():
            if name != GENERATION:
                (directory / name).write_bytes(content)
        return
    config = dict(target.config)
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = dtype
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if len(files) > 1:
        places = sorted((name, file.path.name) for file in files for name in file.tensors)
        index = {"metadata": {"total_size": sum(file.size for file in files)}, "weight_map": dict(places)}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for name, content in target.companions.items():
        (directory / name).write_bytes(content)
    if not (directory / GENERATION).exists():
        tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
        (directory / GENERATION).write_text(json.dumps({"_from_model_config": True} | tokens) + "\n")


def _check_directories(out: Path, temporary: Path) -> None:
    """Raise UserError if `out` is in use, or `temporary` is something else than what a killed export leaves."""
    names = os.listdir(temporary) if temporary.exists() else []
    is_in_use = out.exists() and (not out.name or not out.is_dir() or any(out.iterdir()))
    for directory, is_foreign, rule in [
        (out, is_in_use, "exists and is not an empty directory; name another, or remove it"),
        (
            temporary,
            temporary.is_symlink() or (names and not any(map(LOCK.fullmatch, names))),
            "exists, and no export that was interrupted left it; move it elsewhere, or name another --out",
        ),
    ]:
        if is_foreign:
            raise UserError(f"{directory} {rule}")


def _remove_files(temporary: Path) -> None:
    """Remove what an export that was killed has left, but for the lock."""
    for file in temporary.iterdir():
        if not LOCK.fullmatch(file.name):
            file.unlink()


def _in_process_0(out: Path, action: Callable[[], None]) -> None:
    """Call `action` in process 0 while the others wait."""
    with _all_or_none(out):
        if jax.process_index() == 0:
            action()


@contextmanager
def _all_or_none(out: Path) -> Iterator[None]:
    """A block after which all processes wait for each other, and all raise if one has."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
    if jax.process_count() > 1:
        failed = np.any(multihost_utils.process_allgather(np.array([failure is not None])))
        if failed and failure is None:
            failure = StorageError(f"{out} could not be written by another process, which prints the reason")
    if isinstance(failure, OSError):
        reason = failure.strerror or str(failure)
        way_out = "free some space" if failure.errno in (errno.ENOSPC, errno.EDQUOT) else "name another directory"
        raise StorageError(f"{out} could not be written: {reason}; nothing is left there, {way_out}") from failure
    if failure is not None:
        raise failure
