"""Devices that are not attached, of any kind that a step can be planned for: TPU slices and nodes of NVIDIA GPUs."""

from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import GENERATIONS
from shmap_tp.plan.gpu.predict import estimate
from shmap_tp.plan.gpu.targets import GPUS, GPUS_PER_NODE, Nodes, find_nodes
from shmap_tp.plan.predict import Prediction, predict
from shmap_tp.plan.topologies import Slice, find_slice

VERSIONS = [*GENERATIONS, *GPUS]
"""What `--version` takes."""

Target = Slice | Nodes


def find_target(version: str, devices: int, topology: str | None, slices: int) -> Target:
    """The slices or nodes of `version` with this number of devices.  Raises UserError where there are none."""
    if version not in GPUS:
        return find_slice(version, devices, topology, slices)
    for name, value in (("topology", topology), ("slices", slices if slices != 1 else None)):
        if value is not None:
            raise UserError(f"--{name} {value}: GPUs have none; omit it")
    return find_nodes(version, devices)


def devices_of_nodes(versions: str, nodes: int | None) -> int | None:
    """The GPUs of `--nodes`; None where it is not given.  Raises UserError where one of `versions` is a TPU."""
    if nodes is None:
        return None
    for version in versions.split(","):
        if version not in GPUS:
            raise UserError(f"--nodes {nodes} is for GPUs ({', '.join(GPUS)}); give --devices for {version}")
    if nodes < 1:
        raise UserError(f"--nodes {nodes} is too small; it must be 1 or more")
    return nodes * GPUS_PER_NODE


def predict_on(config: Config, target: Target, *, record: bool = False) -> Prediction:
    """The step of `config` on `target`, compiled for it: `predict` for TPUs, `estimate` for GPUs."""
    if isinstance(target, Nodes):
        return estimate(config, target, record=record)
    return predict(config, target, record=record)
