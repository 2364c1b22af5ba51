"""Random states and configurations for tests of checkpoints."""

from pathlib import Path

import jax
import numpy as np

from shmap_tp.config.choices import Resume
from shmap_tp.config.schema import CheckpointConfig
from shmap_tp.training.step import State, StepFunctions

FACTS = {"mesh": [2, 4], "rate": 0.1}


def random_state(functions: StepFunctions, seed: int) -> State:
    """A state of random values: no two leaves are equal, as in a trained state."""
    generator = np.random.default_rng(seed)

    def leaf(shape: jax.ShapeDtypeStruct) -> jax.Array:
        values = 1e3 * generator.standard_normal(shape.shape)
        return jax.device_put(np.asarray(values, shape.dtype), shape.sharding)

    return jax.tree.map(leaf, functions.shapes)


def checkpoint_config(
    directory: Path, *, keep: int = 3, keep_every: int | None = None, local_dir: str | None = None
) -> CheckpointConfig:
    """Save every step to `directory`."""
    more = {"hours_between_failures": None, "keep": keep, "keep_every": keep_every, "resume": Resume.never}
    more |= {"local_dir": local_dir, "local_every": 1}
    return CheckpointConfig(str(directory), every=1, **more)


def files(directory: Path) -> list[Path]:
    """All files below `directory`, in order."""
    return sorted(path for path in directory.rglob("*") if path.is_file())
