"""Tensor-parallel transformer training in JAX: every layer under `shard_map`, every collective written by hand.

Example: train a small model on a (2, 4) mesh.  Without accelerators its eight devices are emulated on the CPU.

    import numpy as np
    import shmap_tp

    config = shmap_tp.load_config("model=test", "mesh.dp=2", "mesh.mp=4", "train.batch=16")
    trainer = shmap_tp.Trainer(config)
    generator = np.random.default_rng(0)
    for _ in range(5):
        start = generator.integers(0, config.model.vocabulary, (16, 1))
        tokens = (start + np.arange(33)) % config.model.vocabulary  # [batch, context + 1]: the inputs and their targets
        metrics = trainer.step(tokens)
        print(float(metrics["loss"]))
    model = trainer.model()
    logits = model.logits(tokens[:, :-1])  # float32[batch, context, vocabulary]
    loss, gradients = model.loss_and_gradients(tokens)  # gradients are a pytree like model.parameters

Contents
    load_config             the configuration in a file, with `key=value` overrides
    make_mesh               the (dp, mp) mesh of a configuration
    Model                   parameters on a mesh: logits, loss, gradients, generation, scores; initialised or restored
    from_pretrained         the model in a Hugging Face directory, on a mesh; Model.save_pretrained writes one
    Trainer                 a training step to be called in a loop of your own, with checkpoints
    run_training            a whole run: data, evaluation, checkpoints, resuming
    Components, Optimizer   parts of a model or a step of your own (docs/extending.md)
    Config                  the type of a configuration; `shmap_tp.config.schema` documents every key
    Transformer, State      the types of the parameters and of a training state
    UserError               raised for input that cannot be used; its message says what to do
    ShmapTpError            the base class of this and the other errors of a run
    __version__             the version of this package

Importing shmap_tp is fast: JAX is imported with the first of these names that needs it, and no device is used before
the first call that needs one.  The commands are `shmap-tp train`, `prepare`, `report`, `plan`,
`generate`, `chat`, `evaluate`, `pretrained` and `verify`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from shmap_tp.runtime.requirements import check_requirements

check_requirements()

if TYPE_CHECKING:
    from shmap_tp.api import Model, from_pretrained, load_config, run_training
    from shmap_tp.config.schema import Config
    from shmap_tp.errors import ShmapTpError, UserError
    from shmap_tp.model.transformer import Transformer
    from shmap_tp.trainer import Trainer
    from shmap_tp.training.environment import make_mesh
    from shmap_tp.training.optimizer import Optimizer
    from shmap_tp.training.step import Components, State

__version__ = "0.1.0"
"""The version of this package: the only place that states it, so that it is the same of a wheel and of a clone."""

_MODULES = {
    "load_config": "shmap_tp.api",
    "make_mesh": "shmap_tp.training.environment",
    "Model": "shmap_tp.api",
    "from_pretrained": "shmap_tp.api",
    "Trainer": "shmap_tp.trainer",
    "run_training": "shmap_tp.api",
    "Components": "shmap_tp.training.step",
    "Optimizer": "shmap_tp.training.optimizer",
    "Config": "shmap_tp.config.schema",
    "Transformer": "shmap_tp.model.transformer",
    "State": "shmap_tp.training.step",
    "UserError": "shmap_tp.errors",
    "ShmapTpError": "shmap_tp.errors",
}
"""The module that defines each public name.  A name is imported when it is first used."""

__all__ = [  # noqa: RUF022 - in the order of the docstring
    "load_config", "make_mesh", "Model", "from_pretrained", "Trainer", "run_training", "Components", "Optimizer",
    "Config", "Transformer", "State", "UserError", "ShmapTpError", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name on its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
