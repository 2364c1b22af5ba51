"""Whether a run would train on TPU slices that are not rented yet: `main.py --check --type TYPE`, and pod.sh before it
rents anything.

The hosts of new slices have empty disks and the files of this clone that git tracks.  So whatever else a run reads must
be in a bucket or on a mount, and the mesh must have the devices, hosts and slices of the type.  Nothing is written.
"""

from dataclasses import replace
from pathlib import PurePath

from shmap_tp.config.mesh_sizes import keys_in_words, product_in_words
from shmap_tp.config.schema import Config, DataConfig, MeshConfig, Resume
from shmap_tp.config.sources import each_source
from shmap_tp.config.validate import resolve_auto
from shmap_tp.data.batches import check_alike, check_pairs, data_warning, isolating_token, open_data
from shmap_tp.data.location import STDLIB, bucket_messages, open_file_system, prepare_and_copy
from shmap_tp.data.metadata import DTYPES, SPLITS, TOKENIZER, Meta
from shmap_tp.data.tokenizer import Bytes
from shmap_tp.errors import UserError
from shmap_tp.hardware.slice_types import RentedSlices, find_slices
from shmap_tp.model.components import ModelComponents
from shmap_tp.runtime.files import first_contact
from shmap_tp.training.check import summary

BOOT_DISK = 100e9
"""Bytes of the disk of a host, at most: https://docs.cloud.google.com/tpu/docs/storage-options (100 GiB), with a little
for the system."""


def check_slices(config: Config, name: str, export: str, components: ModelComponents) -> str:
    """The summary, in lines, of a run of `config` on the slices of `name`, such as v3-32 or 2xv5litepod-256; the others
    as in `check`.

    Communication  the files of the buckets of data.dir and checkpoint.dir are listed, and the small ones read.
    Raises UserError naming the first reason why the run would not train there.
    """
    slices = find_slices(name)
    config = resolve_auto(config, slices.devices)
    check_mesh(config.mesh, slices)
    check_places(config, slices)
    sources = {name: _data(config, data) for name, data in each_source(config.data).items()}
    check_alike({name: meta for name, (*_, meta) in sources.items() if meta})
    _check_checkpoints(config)
    start = f"The run can start on {slices}: {slices.devices} devices, hosts: {slices.hosts}."
    found = {name: (what, warning) for name, (what, warning, _) in sources.items()}
    described = summary(config, found, export, components)
    return f"{described}\n{start}  Its memory is not checked: python -m shmap_tp.plan --help"


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
    checkpoints = config.checkpoint.dir
    for name, data in each_source(config.data).items():
        if not _is_on_host(data.dir) or data.source == STDLIB:
            continue
        bucket = checkpoints.split("/")[2] if checkpoints.startswith("gs://") else "BUCKET"
        url, key = f"gs://{bucket}/{data.name}", f"data.sources.{name}.dir" if name else "data.dir"
        raise UserError(
            f"{key}={data.dir} is on the disks of the hosts, which have no data; use {key}={url}, after\n"
            f"{prepare_and_copy(data, config.model.from_pretrained, url)}"
        )
    weights = config.model.from_pretrained
    if weights is not None and _is_on_host(weights):
        raise UserError(
            f"model.from_pretrained={weights} is on this machine, but not on the hosts; give the absolute path "
            "of a directory that is here and on every host, such as a mounted bucket"
        )
    if slices.hosts > 1 and _is_on_host(checkpoints):
        raise UserError(
            f"checkpoint.dir={checkpoints} is on the disk of each of {slices.hosts} hosts, which save "
            f"a checkpoint together; use checkpoint.dir=gs://BUCKET/{config.run.name}"
        )


def _is_on_host(path: str) -> bool:
    """Whether a path is below the clone of each host, and not in a bucket or on a mount."""
    return "://" not in path and not PurePath(path).is_absolute()


def _data(config: Config, data: DataConfig) -> tuple[str, str | None, Meta | None]:
    """(what is in data.dir, one of the sources, in words; why it may be the wrong one; its meta.json, where it is).
    Raises UserError if the run could not train on it."""
    if data.source == STDLIB and "://" not in data.dir:
        stdlib = Meta(dtype="uint16", vocabulary=Bytes.vocabulary, tokenizer=Bytes.name)
        warning = data_warning(data, config.model, stdlib)
        return "prepared by each host from the Python library, which is only a test", warning, stdlib
    if "://" not in data.dir:
        return "looked at when a run starts", None, None
    streamed = replace(data, cache=None)
    _, meta, _ = open_data(streamed, config.model, ())
    check_pairs(meta, data, config.train)
    isolating_token(streamed, config.model)
    if not meta.tokens or not meta.sha256 or meta.vocabulary is None:
        return "there; meta.json does not say which tokens, which are looked at when a run starts", None, meta
    _, meta, companions = open_data(streamed, config.model, SPLITS)
    size = sum(meta.tokens.values()) * DTYPES[meta.dtype].itemsize
    if data.cache is not None and _is_on_host(data.cache) and size > BOOT_DISK:
        raise UserError(
            f"{data.dir} has {size / 1e9:,.0f} GB, and the disk of a host {BOOT_DISK / 1e9:.0f} GB for its copy in "
            f"data.cache={data.cache}; use data.cache=null, which reads rows from the bucket"
        )
    what = f"{meta.tokens['train']:,} tokens, tokenizer {meta.tokenizer}, vocabulary {meta.vocabulary}"
    warning = data_warning(data, config.model, meta)
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
    if steps and resume == Resume.never:
        raise UserError(f"{url} has checkpoints; continue with --resume, or choose another checkpoint.dir")
    if not steps and resume == Resume.must:
        raise UserError(f"--resume: no checkpoint in {url}; leave it out to start a new run there")
