"""What `--check` prints: a summary of a configuration, from the configuration alone.

Nothing is written, no device is used and no token is read.  What depends on them is checked when a run starts.
"""

from pathlib import Path

from shmap_tp.config.schema import AUTO, Config
from shmap_tp.data.token_files import SPLITS
from shmap_tp.model.flops import parameters
from shmap_tp.parallel.mesh import DataParallelGroups


def check(config: Config) -> str:
    """The summary, in lines, of a `config` that `compose.load` has returned.  Raises UserError if its mesh cannot be
    formed on any devices."""
    model, train, run = config.model, config.train, config.run
    tokens = train.batch * model.context
    lines = {
        "model": f"{model.name}: {parameters(model):,} parameters, {model.layers} layers of width {model.width}",
        "mesh": _mesh(config),
        "batch": f"{train.batch} sequences x {model.context} tokens = {tokens:,} tokens per step, "
        f"in {train.microbatches} microbatches",
        "steps": f"{train.steps:,}, together {train.steps * tokens:,} tokens",
        "data": f"{config.data.dir}: {_data(config)}",
        "run.dir": run.dir,
        "checkpoint.dir": f"{config.checkpoint.dir}, checkpoint.resume={config.checkpoint.resume}",
    }
    return "\n".join(
        [
            *(f"{name:<15} {text}" for name, text in lines.items()),
            "The configuration is valid.  Devices, memory and tokens are checked when a run starts.",
        ]
    )


def _mesh(config: Config) -> str:
    mesh = config.mesh
    modes = f"tensor_parallel={mesh.tensor_parallel}, zero={mesh.zero}, processes={mesh.processes}"
    if mesh.dp == AUTO:
        return f"dp={AUTO} (all devices / mp) x mp={mesh.mp}; {modes}"
    DataParallelGroups.of(mesh)
    return f"dp={mesh.dp} x mp={mesh.mp} = {mesh.dp * mesh.mp} devices; {modes}"


def _data(config: Config) -> str:
    if all((Path(config.data.dir) / f"{split}.bin").is_file() for split in SPLITS):
        return "prepared"
    if config.data.source:
        return f"not prepared; a run prepares it (data.source={config.data.source})"
    return "not prepared; python -m shmap_tp.prepare --help shows how to"
