"""The training step and the training run of `import shmap_tp`, for one process.

B batch, T time.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from shmap_tp import api
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.hardware.xla_options import compile_with, compiler_options
from shmap_tp.inference.training_samples import make_training_sampler
from shmap_tp.model.tokens import Counted, Tokens, marked_tokens, rectangular
from shmap_tp.model.transformer import Transformer
from shmap_tp.pretrained.source import Source
from shmap_tp.pretrained.start import pretrained_parameters, with_pretrained
from shmap_tp.training import loop
from shmap_tp.training.environment import compute_dtype, require_host_memory, resolve
from shmap_tp.training.step import CONFIGURED, Components, State, StepFunctions, build_step_functions


class Trainer:
    """The training step of a configuration, with its state: for a loop of your own.

        trainer = shmap_tp.Trainer(config)
        metrics = trainer.step(tokens)

    The loop takes care of data, evaluation, checkpoints and signals; `run_training` is a loop that has them.
    """

    def __init__(self, config: Config, model: api.Model | None = None, components: Components = CONFIGURED):
        """Starts from a copy of the parameters of `model`, which has the same shape, or those of `Model.initialize`.

        `components` replace parts that the configuration names (docs/extending.md).
        Raises UserError if the devices do not make the mesh, or mesh.processes is not 1.
        """
        if config.mesh.processes != 1:
            raise UserError(
                f"mesh.processes={config.mesh.processes}: Trainer is for one process; start several with shmap-tp train"
            )
        self.config, self.mesh = resolve(config)
        self.components = components
        self.functions: StepFunctions = build_step_functions(
            self.config, self.mesh, compute_dtype(config.train.precision), components
        )
        require_host_memory(self.functions.shapes)
        start, self._source = self._start(model)
        self.state: State = self.functions.init() if start is None else self.functions.init_from(start)
        """Parameters, optimizer state and number of steps.  A step consumes it: its arrays are reused for the next."""
        api.finished(self.mesh, self.state)
        options = compiler_options(self.mesh.devices.flat[0].device_kind, self.config)
        self._compiled = compile_with(self.functions.step.lower(self.functions.shapes, self.functions.tokens), options)

    def _start(self, model: api.Model | None) -> tuple[Transformer | None, Source | None]:
        """(parameters other than the random ones, where they are from)."""
        shapes = self.functions.shapes.params
        if model is not None:
            return _copies(model.parameters, shapes), model.source
        return (None, None) if self.config.model.from_pretrained is None else pretrained_parameters(self.config, shapes)

    def step(self, tokens: Tokens, counted: Counted | None = None) -> dict[str, Array]:
        """One optimizer step on tokens[train.batch, context+1]; its metrics, such as "loss" and "grad_norm".

        `counted`, of the same shape, selects the tokens that count as targets; None: all (`Model.loss`).

        On an accelerator it returns before the step is computed; converting a metric, as in float(metrics["loss"]),
        waits for it.  A step whose loss or gradient is not finite changes no parameter.
        Raises UserError if the tokens have another shape, or an id is not below model.vocabulary.
        """
        self.state, metrics = self._compiled(self.state, self._batch(tokens, counted))
        return api.finished(self.mesh, metrics)

    def evaluate(self, tokens: Tokens, counted: Counted | None = None) -> Float[Array, ""]:
        """Mean cross entropy of tokens[train.batch, context+1] with the current parameters; `counted` as in `step`."""
        return api.finished(self.mesh, self.functions.evaluate(self.state.params, self._batch(tokens, counted)))

    def model(self) -> api.Model:
        """A `Model` with a copy of the current parameters: it stays as it is while training goes on."""
        config, mesh, functions = api.build(self.config, self.components)
        parameters = api.finished(mesh, _copies(self.state.params, functions.shapes))
        return api.Model(config, mesh, parameters, functions, self._source)

    def _batch(self, tokens: Tokens, counted: Counted | None) -> Array:
        """tokens[batch, T+1] -> int32[microbatches, batch / microbatches, T+1] on the devices."""
        expected = (self.config.train.batch, self.config.model.context + 1)
        if (shape := rectangular(tokens).shape) != expected:
            raise UserError(
                f"tokens have the shape {list(shape)}, a step takes {list(expected)}: [train.batch, model.context + 1]"
            )
        rows = marked_tokens(tokens, counted, self.config.model)
        return jax.device_put(rows.reshape(self.functions.tokens.shape), self.functions.tokens.sharding)


def _copies(parameters: Transformer, shapes: Transformer) -> Transformer:
    """A copy of the parameters with the dtypes and the shardings of `shapes`."""
    return jax.tree.map(lambda w, to: jax.device_put(jnp.array(w, to.dtype), to.sharding), parameters, shapes)


def run_training(config: Config, components: Components = CONFIGURED) -> bool:
    """A whole run as `shmap-tp train` makes it: data, evaluation, checkpoints, metrics and a loss curve in run.dir.

    True if all steps were trained, False if the run was asked to stop and has saved; then checkpoint.resume=must
    continues it.  The mesh must use all devices; on a CPU they are emulated if no backend has been used before.
    Raises UserError if the input cannot be used, and other errors of `shmap_tp.errors` as the command prints them.
    """
    components = with_pretrained(config, components)
    return loop.train(config, components=components, make_sampler=make_training_sampler) == 0
