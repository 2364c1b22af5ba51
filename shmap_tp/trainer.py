"""The training step with its state, for a loop of the user's own: `shmap_tp.Trainer`."""

import threading
from dataclasses import replace
from functools import cached_property
from os import PathLike
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from shmap_tp.api import Model, build, finished
from shmap_tp.config.compose import to_dict
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import mesh_shape
from shmap_tp.config.values import SCHEMES, check_path
from shmap_tp.errors import UserError
from shmap_tp.hardware.xla_options import compile_with, compiler_options
from shmap_tp.layers.context import (
    Counted,
    Segments,
    Tokens,
    batch_tokens,
    checked_segments,
    rectangular,
    with_free_space,
)
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.partitioning import leaves_by_path
from shmap_tp.parallel.weights import require_unquantized
from shmap_tp.pretrained.source import Source
from shmap_tp.pretrained.start import base_of, pretrained_parameters, recorded_base, recorded_source
from shmap_tp.runtime.run_lock import lock_directories
from shmap_tp.training.checkpoint import Checkpoints
from shmap_tp.training.checkpoint_files import find_checkpoint, saved_config
from shmap_tp.training.components_file import components_of, require_components
from shmap_tp.training.environment import compute_dtype, require_host_memory, resolve
from shmap_tp.training.resume import require_same_model, without_base
from shmap_tp.training.step import CONFIGURED, Components, State, StepFunctions, build_step_functions


class Trainer:
    """The training step of a configuration, with its state: for a loop of your own.

        trainer = shmap_tp.Trainer(config)
        metrics = trainer.step(tokens)

    The loop takes care of data, evaluation and signals, and says when to save; `run_training` is a loop that has them.
    Threads may share a Trainer: one call is computed at a time.
    """

    def __init__(self, config: Config, model: Model | None = None, components: Components = CONFIGURED):
        """Starts from a copy of the parameters of `model`, which has the same shape, or those of `Model.initialize`.

        `components` replace parts that the configuration names (docs/extending.md).
        Raises UserError if the devices do not make the mesh, `model` has another shape, or the
        processes of mesh.processes have not joined.
        """
        self.config, self.mesh = resolve(config)
        self.components = components = components_of(config, components)
        self._lock = threading.Lock()
        self.functions: StepFunctions = build_step_functions(
            self.config, self.mesh, compute_dtype(config.train.precision), components
        )
        require_host_memory(self.functions.shapes)
        start, self._source = self._start(model)
        self.state: State = self.functions.init() if start is None else self.functions.init_from(start)
        """Parameters, optimizer state and number of steps.  A step consumes it: its arrays are reused for the next."""
        finished(self.mesh, self.state)
        if config.train.dpo_beta is None:  # only segments say what a pair is
            _ = self._compiled  # before the first step

    def _compile(self, *batch: jax.ShapeDtypeStruct) -> Any:
        options = compiler_options(self.mesh.devices.flat[0].device_kind, self.config)
        return compile_with(self.functions.step.lower(self.functions.shapes, *batch), options)

    @cached_property
    def _compiled(self) -> Any:
        return self._compile(self.functions.tokens)

    @cached_property
    def _compiled_with_segments(self) -> Any:
        return self._compile(self.functions.tokens, self.functions.tokens)

    def _start(self, model: Model | None) -> tuple[Transformer | None, Source | None]:
        """(parameters other than the random ones, where they are from)."""
        shapes = self.functions.shapes.params
        if model is not None:
            require_unquantized(model.parameters, "trained")
            _require_same_shapes(model, shapes)
            return copies(model.parameters, shapes), model.source
        return (None, None) if self.config.model.from_pretrained is None else pretrained_parameters(self.config, shapes)

    def step(
        self, tokens: Tokens, counted: Counted | None = None, segments: Segments | None = None
    ) -> dict[str, Array]:
        """One optimizer step on tokens[train.batch, context+1]; its metrics, such as "loss" and "grad_norm".

        `counted`, of the same shape, selects the tokens that count as targets, and `segments` numbers the documents of
        each row (`Model.loss`); None: all, and one.  `data.documents` is about token files, which are not read here.

        On an accelerator it returns before the step is computed; converting a metric, as in float(metrics["loss"]),
        waits for it.  A step whose loss or gradient is not finite changes no parameter.
        Raises UserError if the tokens have another shape, or an id is not below model.vocabulary.
        """
        return self.step_on(*self._batch(tokens, counted, segments))

    def step_on(self, *batch: Array) -> dict[str, Array]:
        """`step` on a batch that is on the devices, as `Batches` has it: tokens, and segments if there are any, both
        [A B T+1]."""
        with self._lock:
            compiled = self._compiled if len(batch) == 1 else self._compiled_with_segments
            self.state, metrics = compiled(self.state, *batch)
            return finished(self.mesh, metrics)

    def evaluate(
        self, tokens: Tokens, counted: Counted | None = None, segments: Segments | None = None
    ) -> Float[Array, ""]:
        """Mean cross entropy of tokens[train.batch, context+1] with the current parameters; the others as in `step`."""
        batch = self._batch(tokens, counted, segments)
        with self._lock:
            return finished(self.mesh, self.functions.evaluate(self.state.params, *batch))[0]

    def model(self) -> Model:
        """A `Model` with a copy of the current parameters: it stays as it is while training goes on."""
        config, mesh, functions = build(self.config, self.components)
        with self._lock:
            parameters = finished(mesh, copies(self.state.params, functions.shapes))
        return Model(config, mesh, parameters, functions, self._source)

    def save(self, directory: str | PathLike) -> str:
        """Save the state as the checkpoint `directory`/STEP, and return its path.

        It is a checkpoint as those of runs, without the identity of the data, which a Trainer does not know: `restore`,
        `Model.restore` and the commands that take a checkpoint read it, and a run does not resume from it.
        checkpoint.keep and checkpoint.keep_every say which older ones are deleted.
        Raises UserError if `directory` has the checkpoints of a run, this step, or another process that saves there;
        StorageError if the disk is full.
        """
        check_path("directory", name := str(directory), SCHEMES["checkpoint.dir"])
        given = replace(self.config.checkpoint, dir=name)
        facts = {"config": to_dict(self.config), "mesh": mesh_shape(self.config.mesh)}
        facts["components"] = self.components.replaced
        with (
            self._lock,
            lock_directories({"directory": name}) as require_owner,
            Checkpoints(given, print, require_owner) as checkpoints,
        ):
            step, there = int(self.state.step), checkpoints.steps()
            if there and "data" in (checkpoints.facts(there[0]) or {}):
                raise UserError(f"{name} has the checkpoints of a run; save in another directory")
            if step in there:
                raise UserError(f"{name} has a checkpoint of step {step}; save it in another directory, or remove that")
            checkpoints.save(step, self.state, facts, int(self.state.guard.in_a_row))
        return f"{name}/{step}"

    def restore(self, directory: str | PathLike, *, step: int | None = None) -> int:
        """Continue from a checkpoint of `save` or of a run: parameters, optimizer state and step, bit for bit, whatever
        the mesh that saved them.  Returns the step.

        `directory` and `step` are those of `Model.restore`.  Raises UserError if there is no such checkpoint, or it is
        of another model or optimizer.
        """
        check_path("directory", str(directory), SCHEMES["checkpoint.dir"])
        checkpoint = find_checkpoint(str(directory), step)
        given = replace(self.config.checkpoint, dir=str(checkpoint.parent))
        with self._lock, Checkpoints(given, print, writes=False) as checkpoints:
            found, config, shapes = int(checkpoint.name), saved_config(checkpoint), self.functions.shapes
            require_same_model(config.model, self.config.model, str(checkpoint))
            require_components(checkpoints.facts(found), self.components, str(checkpoint))
            base = recorded_base(checkpoint)
            state = checkpoints.restore(found, shapes if base is None else without_base(shapes))
            if base is not None:
                whole = eqx.combine(state.params, base_of(checkpoint, base, config.model, shapes.params))
                state = replace(state, params=whole)
            self.state = finished(self.mesh, state)
            self._source = recorded_source(checkpoint, config)
            return int(self.state.step)

    def _batch(self, tokens: Tokens, counted: Counted | None, segments: Segments | None) -> list[Array]:
        """[tokens, segments if there are any], [batch, T+1] -> int32[microbatches, batch / microbatches, T+1] on the
        devices."""
        expected = (self.config.train.batch, self.config.model.context + 1)
        if (shape := rectangular(tokens).shape) != expected:
            raise UserError(f"tokens have the shape {list(shape)}, not {list(expected)} (train.batch, context + 1)")
        rows = batch_tokens(tokens, counted, self.config.model)
        segments = None if segments is None else checked_segments(segments, rows)
        segments, to = with_free_space(segments, rows, self.config.model), self.functions.tokens
        given = [rows] if segments is None else [rows, segments]
        return [jax.device_put(each.reshape(to.shape), to.sharding) for each in given]


def _require_same_shapes(model: Model, shapes: Transformer) -> None:
    """Raise UserError if a parameter of `model` has another shape than the Trainer's."""
    found, wanted = leaves_by_path(model.parameters), leaves_by_path(shapes)
    for name in sorted(found.keys() | wanted.keys()):
        has, needs = (list(tree[name].shape) if name in tree else None for tree in (found, wanted))
        if has != needs:
            raise UserError(
                f"the model given to Trainer is of another shape than its configuration: {name} is {has}, needed is "
                f"{needs};\ngive both the same model=... and model.* settings"
            )


def copies(parameters: Transformer, shapes: Transformer) -> Transformer:
    """A copy of the parameters with the dtypes and the shardings of `shapes`."""
    return jax.tree.map(lambda w, to: jax.device_put(jnp.array(w, to.dtype), to.sharding), parameters, shapes)
