"""What `--check` prints: the summary of a configuration, from the configuration alone.

Nothing is written, no device is used and no token is read.  What depends on them is checked when a run starts.

With `--type TYPE` it is also whether the run would train on TPU slices that are not rented yet; pod.sh asks that before
it rents anything.  The hosts of new slices have empty disks and the files of this clone that git tracks.  So whatever
else a run reads must be in a bucket or on a mount, and the mesh must have the devices, hosts and slices of the type.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePath

from shmap_tp.config.choices import Resume
from shmap_tp.config.schema import AUTO, Config, DataConfig, MeshConfig
from shmap_tp.config.sources import describe_shares, each_source, phases
from shmap_tp.config.validate import keys_in_words, product_in_words, resolve_auto
from shmap_tp.config.values import SCHEMES, value_of
from shmap_tp.data import batches
from shmap_tp.data.location import bucket_messages, open_file_system, prepare_and_copy, prepare_command, stdlib_meta
from shmap_tp.data.metadata import DTYPES, SPLITS, TOKENIZER, Meta, read_meta
from shmap_tp.data.tokenizer import Bytes
from shmap_tp.errors import UserError, refuse_first
from shmap_tp.hardware.devices import RentedSlices, find_slices
from shmap_tp.model.flops import parameters
from shmap_tp.model.sharded_model import ModelComponents
from shmap_tp.parallel.mesh import axis_sizes
from shmap_tp.runtime.files import first_contact
from shmap_tp.training.optimizer import describe_schedule

Found = tuple[str, str | None, Meta | None]
"""What is in the directory of a source, in words; why it may be the wrong one; its meta.json, where it is."""


LATER = "Devices, memory, tokens and checkpoints are checked when a run starts."


def check(config: Config, export: str, components: ModelComponents, name: str | None = None) -> str:
    """The summary, in lines, of a `config` that `compose.load` has returned; with the `name` of slices, such as v3-32
    or 2xv5litepod-256, of its run there.  `export` says as what its model can be exported.

    Communication  with `name`, the files of the buckets of data.dir and checkpoint.dir are listed, and the small ones
                   read.
    Raises UserError if its mesh cannot be formed, or a directory cannot be written, naming the first reason.
    """
    slices = None
    try:
        if name is None:
            _check_directories(config)
        else:
            slices = find_slices(name)
            config = resolve_auto(config, slices.devices)
            check_mesh(config.mesh, slices)
            check_places(config, slices)
        look = _data_for_slices if slices else _data
        sources = {source: look(data, config) for source, data in each_source(config.data).items()}
        batches.check_alike({source: meta for source, (*_, meta) in sources.items() if meta})
        if slices:
            _check_checkpoints(config)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}; choose another directory") from error
    described = _summary(config, sources, export, components)
    if slices is None:
        return f"{described}\nThe configuration is valid.  {LATER}"
    start = f"The run can start on {slices}: {slices.devices} devices, hosts: {slices.hosts}."
    return f"{described}\n{start}  Its memory is not checked: python -m shmap_tp.plan --help"


def _summary(config: Config, sources: dict[str, Found], export: str, components: ModelComponents) -> str:
    """What a `config` would train, in lines."""
    model, train, run = config.model, config.train, config.run
    tokens = train.batch * model.context
    lines = {
        "model": f"{model.name}: {parameters(model, components=components):,} parameters, {model.layers} layers of "
        f"width {model.width}",
        "mesh": _mesh(config),
        "batch": f"{train.batch} sequences x {model.context} tokens = {tokens:,} tokens per step, "
        f"in {train.microbatches} microbatches",
        "steps": f"{train.steps:,}, together {train.steps * tokens:,} tokens",
        **({} if train.dpo_beta is None else {"objective": f"preferences (DPO), beta {train.dpo_beta}"}),
        "learning rate": describe_schedule(config.optimizer, train.steps),
        **_data_lines(config, sources),
        "export": export,
        "run.dir": run.dir,
        "checkpoint.dir": f"{config.checkpoint.dir}, checkpoint.resume={config.checkpoint.resume}",
    }
    warnings = [warning for _, warning, _ in sources.values() if warning]
    return "\n".join([*(f"{name:<15} {text}" for name, text in lines.items()), *warnings])


def _data_lines(config: Config, sources: dict[str, Found]) -> dict[str, str]:
    """What is in data.dir, or in each of data.sources, with its shares."""
    if not config.data.sources:
        return {"data": f"{config.data.dir}: {sources[''][0]}"}
    parts, steps = phases(config.data), config.train.steps
    return {
        f"source {name}": f"{data.dir}: {describe_shares(name, parts, steps)}; {sources[name][0]}"
        for name, data in each_source(config.data).items()
    }


def _check_directories(config: Config) -> None:
    """Raise UserError if what exists of a directory that a run creates is a file, or must not be written."""
    for key in SCHEMES:
        path = value_of(config, key)
        if path is None or "://" in path or (key == "data.dir" and not stdlib_meta(config.data)):
            continue
        there = next(part for part in (Path(path).absolute(), *Path(path).absolute().parents) if os.path.exists(part))
        if not there.is_dir() or not os.access(there, os.W_OK):
            reason = f"no permission for {there}" if there.is_dir() else f"{there} is a file"
            raise UserError(f"{key}={path} cannot be written: {reason}; choose another")


def _mesh(config: Config) -> str:
    mesh = config.mesh
    modes = f"tensor_parallel={mesh.tensor_parallel}, zero={mesh.zero}, processes={mesh.processes}"
    if config.model.experts:
        modes += f", ep={mesh.ep}"
    if mesh.dp == AUTO:
        rest = "all devices / mp" if mesh.cp == 1 else "all devices / cp / mp"
        return f"{product_in_words(mesh).replace(AUTO, f'{AUTO} ({rest})')}; {modes}"
    axis_sizes(mesh)
    return f"{product_in_words(mesh)} = {mesh.devices} devices; {modes}"


def _data(data: DataConfig, config: Config) -> Found:
    """Whether data.dir is prepared, or how it is."""
    model = config.model
    if "://" in data.dir:
        return "looked at when a run starts", None, None
    if all((Path(data.dir) / f"{split}.bin").is_file() for split in SPLITS):
        meta = read_meta(Path(data.dir))
        batches.check_rows(meta, data, model)
        batches.isolating_id(meta, data, model)
        batches.check_pairs(meta, data, config.train)
        return "prepared", batches.data_warning(data, model, meta), meta
    if meta := stdlib_meta(data):
        what = f"not prepared; a run prepares it (data.source={data.source})"
        return what, batches.data_warning(data, model, meta), meta
    more = "; --help lists other sources" if data.source is None else ""
    return f"not prepared; {prepare_command(data, model.from_pretrained, data.dir)}{more}", None, None


BOOT_DISK = 100e9
"""Bytes of the disk of a host, at most: https://docs.cloud.google.com/tpu/docs/storage-options (100 GiB), with a little
for the system."""


def check_mesh(mesh: MeshConfig, slices: RentedSlices) -> None:
    """Raise UserError unless a mesh has the devices, hosts and slices of `slices`."""
    if mesh.devices != slices.devices:
        raise UserError(
            f"mesh {product_in_words(mesh)} is {mesh.devices} devices, but {slices} has {slices.devices}; "
            f"choose another --type, or {keys_in_words(mesh)} = {slices.devices}"
        )
    for key, given, there, what in [
        ("mesh.slices", mesh.slices, slices.slices, "slices"),
        ("mesh.processes", mesh.processes, slices.hosts, "hosts"),
    ]:
        if given != there:
            raise UserError(f"{key}={given}, but {slices} has {there} {what}; use {key}={there}")


def check_places(config: Config, slices: RentedSlices) -> None:
    """Raise UserError if the run would look for its data, its weights or its checkpoints on the disk of a host."""
    refuse_first(_faults_of_places(config, slices))


def _faults_of_places(config: Config, slices: RentedSlices) -> Iterator[str]:
    checkpoints = config.checkpoint.dir
    for name, data in each_source(config.data).items():
        if not _is_on_host(data.dir) or stdlib_meta(data):
            continue
        bucket = checkpoints.split("/")[2] if checkpoints.startswith("gs://") else "BUCKET"
        url, key = f"gs://{bucket}/{data.name}", f"data.sources.{name}.dir" if name else "data.dir"
        yield (
            f"{key}={data.dir} is on the disks of the hosts, which have no data; use {key}={url}, after\n"
            f"{prepare_and_copy(data, config.model.from_pretrained, url)}"
        )
    weights = config.model.from_pretrained
    if weights is not None and _is_on_host(weights):
        yield (
            f"model.from_pretrained={weights} is on this machine, but not on the hosts; give the absolute path "
            "of a directory that is here and on every host, such as a mounted bucket"
        )
    if slices.hosts > 1 and _is_on_host(checkpoints):
        yield (
            f"checkpoint.dir={checkpoints} is on the disk of each of {slices.hosts} hosts, which save "
            f"a checkpoint together; use checkpoint.dir=gs://BUCKET/{config.run.name}"
        )


def _is_on_host(path: str) -> bool:
    """Whether a path is below the clone of each host, and not in a bucket or on a mount."""
    return "://" not in path and not PurePath(path).is_absolute()


def _data_for_slices(data: DataConfig, config: Config) -> Found:
    """What is in data.dir, one of the sources.  Raises UserError if the run could not train on it."""
    if stdlib := stdlib_meta(data):
        warning = batches.data_warning(data, config.model, stdlib)
        return "prepared by each host from the Python library, which is only a test", warning, stdlib
    if "://" not in data.dir:
        return "looked at when a run starts", None, None
    streamed = replace(data, cache=None)
    _, meta, _ = batches.open_data(streamed, config.model, ())
    batches.check_pairs(meta, data, config.train)
    batches.isolating_id(meta, data, config.model)
    if not meta.tokens or not meta.sha256 or meta.vocabulary is None:
        return "there; meta.json does not say which tokens, which are looked at when a run starts", None, meta
    _, meta, companions = batches.open_data(streamed, config.model, SPLITS)
    size = sum(meta.tokens.values()) * DTYPES[meta.dtype].itemsize
    if data.cache is not None and _is_on_host(data.cache) and size > BOOT_DISK:
        raise UserError(
            f"{data.dir} has {size / 1e9:,.0f} GB, and the disk of a host {BOOT_DISK / 1e9:.0f} GB for its copy in "
            f"data.cache={data.cache}; use data.cache=null, which reads rows from the bucket"
        )
    what = f"{meta.tokens['train']:,} tokens, tokenizer {meta.tokenizer}, vocabulary {meta.vocabulary}"
    warning = batches.data_warning(data, config.model, meta)
    if warning is None and TOKENIZER not in companions and meta.tokenizer != Bytes.name:
        warning = f"warning: {data.dir} has no tokenizer.json of its data: no samples and no bits per byte"
    return what, warning, meta


def _check_checkpoints(config: Config) -> None:
    """Raise UserError if the bucket of checkpoint.dir is not there, or has what checkpoint.resume does not allow."""
    url, resume = config.checkpoint.dir, config.checkpoint.resume
    if "://" not in url:
        return
    system, path = open_file_system("checkpoint.dir", url)
    bucket = "/".join(url.split("/")[:3])

    def found_there() -> list[str] | None:
        if not system.exists(bucket):
            return None
        return system.ls(path, detail=False) if system.exists(path) else []

    with bucket_messages("checkpoint.dir", url):
        if (found := first_contact(found_there)) is None:
            raise UserError(
                f"checkpoint.dir={url}: there is no {bucket}; create it in the region of the slices:\n"
                f"gcloud storage buckets create {bucket} --location=REGION"
            )
    steps = [each for each in found if PurePath(each).name.isdecimal()]
    for is_wrong, fault in [
        (steps and resume == Resume.never, f"{url} has checkpoints; continue with --resume, or choose another"),
        (not steps and resume == Resume.must, f"--resume: no checkpoint in {url}; leave it out for a new run there"),
    ]:
        if is_wrong:
            raise UserError(fault)
