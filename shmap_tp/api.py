"""What `import shmap_tp` offers: configuration, model and training run; `trainer.py` has the training step.

B batch, T time, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from shmap_tp.config import compose
from shmap_tp.config.choices import HeldIn, Precision
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import validate
from shmap_tp.config.values import SCHEMES, check_path
from shmap_tp.data.subwords import open_tokenizer_file
from shmap_tp.data.tokenizer import Tokenizer
from shmap_tp.errors import UserError, shown
from shmap_tp.inference.generator import Options, generate
from shmap_tp.inference.programs import GenerationPrograms
from shmap_tp.inference.scoring import ScoringProgram
from shmap_tp.inference.text import encode_prompts, make_training_sampler, tokenizer_of_model
from shmap_tp.layers.context import (
    IGNORE,
    Counted,
    Segments,
    Tokens,
    batch_tokens,
    checked_segments,
    checked_tokens,
    with_free_space,
)
from shmap_tp.model.sharded_model import MODEL_PARTS, held_in
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.weights import quantized_as, require_unquantized
from shmap_tp.pretrained import start
from shmap_tp.pretrained.configuration import derive_model, require_expressible
from shmap_tp.pretrained.peft import SavedAdapter, open_adapter
from shmap_tp.pretrained.source import Source, open_source
from shmap_tp.pretrained.writing import Form, save_model, text_for_export
from shmap_tp.training import environment
from shmap_tp.training.checkpoint_files import absolute, find_checkpoint, read_facts, saved_config
from shmap_tp.training.components_file import components_of, require_components
from shmap_tp.training.environment import compute_dtype
from shmap_tp.training.model_functions import ModelFunctions, build_model_functions
from shmap_tp.training.step import CONFIGURED, Components


def load_config(*overrides: str, file: str | PathLike | None = None) -> Config:
    """The configuration in `file`, with `key=value` overrides applied, and checked.

    Without `file` it is the packaged conf/base.yaml, as in `load_config("model=test", "mesh.dp=2", "mesh.mp=4")`.
    Raises UserError if there is no such file, key or group, a type is wrong, a number is out of range, or sizes do not
    divide.
    """
    for item in overrides:
        if not isinstance(item, str):
            raise UserError(f"load_config takes key=value texts, not {shown(item)}; give a list as load_config(*list)")
    return compose.load(compose.CONF / "base.yaml" if file is None else file, list(overrides), derive_model)


@dataclass(frozen=True)
class Model:
    """Parameters on a mesh, and the compiled functions that take them.  Make one with `initialize` or `restore`.

    Methods take token ids as integers [batch, time].  The batch may have any size: it is padded to a multiple of dp.
    The time is padded to the model's context, so that one program serves every length; what was padded is removed.
    `segments`, integers of the shape of the tokens, number the documents of each row: a token sees the earlier tokens
    of its own, and learned positions begin at 0 in each.  None: each row is one document.
    A method of an emulated mesh returns when its result is computed.
    """

    config: Config
    mesh: Mesh
    parameters: Transformer
    """The pytree of parameters, sharded over the mesh: float32, unless the model was read with another dtype."""
    functions: ModelFunctions
    """The compiled functions, which take the parameters as an argument."""
    source: Source | None = None
    """The Hugging Face directory that the model was read from, or that the run it is of started from."""
    checkpoint: str | None = None
    """The checkpoint that it was restored from."""
    given_tokenizer: Tokenizer | None = None
    """The tokenizer of `with_tokenizer`."""

    def __repr__(self) -> str:
        """One line; `config` and `parameters` have the rest."""
        shape, size = self.config.model, sum(leaf.size for leaf in jax.tree.leaves(self.functions.shapes))
        return f"Model({shape.name}, {size:,} parameters, mesh dp={self.config.mesh.dp}, mp={self.config.mesh.mp})"

    @classmethod
    def initialize(
        cls,
        config: Config,
        components: Components = CONFIGURED,
        *,
        pretrained_dtype: str = "float32",
        adapter: SavedAdapter | None = None,
    ) -> "Model":
        """A model with the parameters of model.from_pretrained, or without it the initial ones of run.seed: the same
        bits on every mesh.

        The matrices of model.from_pretrained are of `pretrained_dtype`; all other parameters are float32.  Factors are
        those of `adapter`.
        `components` replace parts that the configuration names (docs/extending.md).
        Raises UserError if the devices do not make the mesh, model.from_pretrained cannot be read, or the memory of a
        machine with emulated devices is too small.
        """
        config, mesh, functions = build(config, components_of(config, components))
        if config.model.from_pretrained is not None:
            parameters, source = start.pretrained_parameters(config, functions.shapes, pretrained_dtype, adapter)
            return cls(config, mesh, finished(mesh, functions.model.with_initial(parameters)), functions, source)
        environment.require_host_memory(functions.shapes, purpose=environment.USE)
        return cls(config, mesh, finished(mesh, functions.initialize()), functions)

    @classmethod
    def restore(
        cls,
        directory: str | PathLike,
        *,
        dp: int | None = None,
        mp: int | None = None,
        cp: int = 1,
        step: int | None = None,
        dtype: str | None = None,
        processes: int = 1,
        components: Components = CONFIGURED,
    ) -> "Model":
        """The model in a checkpoint of a run: the bits that were saved, on any mesh.  The optimizer state is not read.

        `directory` is the run's directory, its checkpoint.dir, or one checkpoint.  Without `step` the newest intact
        checkpoint is used; a damaged one is skipped with a warning.  Without `dp` or `mp` that of the saved mesh is
        used; rows are split along time over `cp`, and no token is sent to experts (ep=1).  With `dtype`, float32 or
        bfloat16, weight matrices, activations and matrix products are of it; `auto` is what the run computes in
        (train.precision), and `int8` the same with the matrices of the blocks held in int8, which are read as `auto`
        first.  Each of several `processes`, which have joined, calls this and has its part.
        Raises UserError if there is no such checkpoint, and as `initialize` does.
        """
        check_path("directory", str(directory), SCHEMES["checkpoint.dir"])
        if processes == 1:
            environment.emulate_devices((dp or 1) * cp * (mp or 1))  # before Orbax uses a backend
        checkpoint = find_checkpoint(str(directory), step)
        config = saved_config(checkpoint)
        require_components(read_facts(checkpoint), components, str(checkpoint), MODEL_PARTS)
        config = replace(config, run=replace(config.run, components=None))  # given here, or of the optimizer alone
        precision = Precision.auto if dtype is None else environment.precision_of(dtype)
        if precision != Precision.auto:
            config = replace(config, train=replace(config.train, precision=precision))
        shape = (config.mesh.dp if dp is None else dp, config.mesh.mp if mp is None else mp)
        mesh = replace(config.mesh, dp=shape[0], mp=shape[1], cp=cp, ep=1, tile=None, slices=1, processes=processes)
        config = replace(config, mesh=mesh)
        validate(config)
        config, mesh, functions = build(config, components)
        held = read = functions.shapes
        if dtype is not None:
            computed = compute_dtype(config.train.precision)
            held, read = held_in(held, computed, int8=dtype == HeldIn.int8), held_in(held, computed)
        environment.require_host_memory(read, purpose=environment.USE)
        parameters = quantized_as(held, start.restored_parameters(checkpoint, functions.shapes, read))
        return cls(config, mesh, parameters, functions, start.recorded_source(checkpoint, config), str(checkpoint))

    @cached_property
    def generation_programs(self) -> GenerationPrograms:
        """The compiled functions of generation."""
        return GenerationPrograms(self.config.model, self.functions.model)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of `with_tokenizer`, of the model's checkpoint or of its Hugging Face directory.

        Raises UserError if there is none.
        """
        return self.given_tokenizer or tokenizer_of_model(self, None)

    @cached_property
    def scoring_program(self) -> ScoringProgram:
        """The compiled function of `score`."""
        return ScoringProgram(self.generation_programs)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        special_tokens_in_text: bool = False,
        **options: Any,
    ) -> list[list[int]]:
        """The ids that continue each prompt, a text or a list of ids; prompts, padding and stop tokens are left out.

        temperature=0 takes the most likely token each time.  `options` are the other fields of
        `shmap_tp.inference.generator.Options`: top_k, top_p, repetition_penalty, seed, stop_tokens, vocabulary and
        samples.  With texts, `tokenizer` encodes them, and its stop tokens and its vocabulary are the defaults; names
        of special tokens in them are ordinary text, or with `special_tokens_in_text` these tokens.
        A sampled token is a function of (seed, prompt number, sample number, position), on every mesh, in every batch.
        An answer ends early where prompt and answer fill model.context.
        Raises UserError for an option out of range, and for a prompt that is empty, has an id that is not below
        model.vocabulary, or leaves no room in model.context.
        """
        if isinstance(prompts, str):
            raise UserError(f"prompts must be a list of texts or of lists of ids; give [{prompts[:20]!r}]")
        if any(isinstance(prompt, str) for prompt in prompts):
            prompts = encode_prompts(self.tokenizer, prompts, special_tokens_in_text=special_tokens_in_text)
            own = {"stop_tokens": self.tokenizer.stop_tokens, "vocabulary": self.tokenizer.vocabulary}
            options = own | options
        settings = Options(max_new_tokens=max_new_tokens, temperature=temperature, **options)
        return generate(self.generation_programs, self.parameters, prompts, settings)

    def score(self, tokens: Tokens, mask: Any, segments: Segments | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(summed log-likelihood in nats, whether each was the most likely token) of the tokens of each row where
        `mask` is true, each given the tokens before it: tokens[B, T], mask[B, T] -> float32[B], bool[B].

        mask[:, 0] must be false.  Raises UserError as `logits` does.
        """
        tokens = checked_tokens(tokens, self.config.model, longest=self.config.model.context + 1, least=0)
        is_masked, mask = isinstance(mask, np.ma.MaskedArray), np.asarray(mask)
        if is_masked or mask.dtype != bool or mask.shape != tokens.shape or mask[:, 0].any():
            raise UserError(f"mask must be booleans {list(tokens.shape)}, as tokens, and false for the first of a row")
        segments = None if segments is None else checked_segments(segments, tokens)
        likelihood, greedy = self.scoring_program(self.parameters, tokens, segments)
        return np.where(mask[:, 1:], likelihood, 0).sum(axis=1), np.where(mask[:, 1:], greedy, True).all(axis=1)

    def with_parameters(self, parameters: Transformer) -> "Model":
        """The same model with other parameters, such as those that an update of your own returns."""
        return replace(self, parameters=parameters)

    def with_tokenizer(self, name: str | PathLike) -> "Model":
        """The same model with a tokenizer for texts: `name` is "bytes" or a tokenizer.json.

        Raises UserError if there is no such file, or it is no tokenizer.
        """
        return replace(self, given_tokenizer=open_tokenizer_file(str(name)))

    def save_pretrained(
        self, directory: str | PathLike, *, dtype: str = "float32", merge: bool = False, rslora: bool = False
    ) -> None:
        """Write a new Hugging Face directory, which `AutoModelForCausalLM.from_pretrained` of transformers reads; of a
        model with adapters one that `PeftModel.from_pretrained` of PEFT reads, or with `merge` the whole model, whose
        matrices without an adapter have the bits of the base on disk.

        Adapters of scale=sqrt_rank (rsLoRA) are written as plain LoRA with a larger alpha, which all engines read, or
        with `rslora` as they are.
        The weights are of `dtype`, float32, bfloat16 or float16.  The tokenizer is copied from what the model was read
        from, or is that of the checkpoint or of `with_tokenizer`.  Raises UserError if `directory` is not empty, no
        supported architecture can express the model, or it is held in int8, StorageError if the disk is full; then
        nothing is left there.
        """
        require_unquantized(self.parameters, "written")
        require_expressible(self.functions.model.components.replaced, "the model")
        base, parameters = None, self.parameters
        if self.config.model.adapter.rank:
            if self.checkpoint is not None:
                base = start.recorded_base(absolute(self.checkpoint))
            elif self.config.model.from_pretrained is not None and not merge:
                base = start.identify(self.config)
            if merge:
                parameters = start.with_base_on_disk(parameters, self.config, base, self.functions.shapes)
        text = None if self.source else text_for_export(self.checkpoint, self.config, self.given_tokenizer)
        form = Form(dtype, merge, rslora)
        save_model(Path(directory), self.config, parameters, self.source, form, base=base, text=text)

    def logits(self, tokens: Tokens, segments: Segments | None = None) -> Float[Array, "B T V"]:
        """Logits of the next token at every position: tokens[B, T] -> float32[B, T, vocabulary].

        Raises UserError if T exceeds model.context, or an id is not below model.vocabulary.
        """
        tokens = checked_tokens(tokens, self.config.model, longest=self.config.model.context, least=0)
        segments = None if segments is None else checked_segments(segments, tokens)
        padded = [self._padded(x, self.config.model.context) for x in (tokens, segments)]
        found = self._finished(self.functions.logits(self.parameters, *padded))
        return found[: tokens.shape[0], : tokens.shape[1], : self.config.model.vocabulary]

    def loss(
        self, tokens: Tokens, counted: Counted | None = None, segments: Segments | None = None
    ) -> Float[Array, ""]:
        """Mean cross entropy, in nats per token, of tokens[B, T+1]: T inputs and their targets, one place later.

        The mean is over the targets that `counted`[B, T+1] selects, or over all; but for targets of another segment
        than their input.  A row may be padded with -1 at its end, which is never counted.  Raises UserError as `logits`
        does, or if `counted` or `segments` has another shape.
        """
        return self._finished(self.functions.loss(self.parameters, *self._sequences(tokens, counted, segments)))

    def loss_and_gradients(
        self, tokens: Tokens, counted: Counted | None = None, segments: Segments | None = None
    ) -> tuple[Float[Array, ""], Transformer]:
        """(mean cross entropy, gradients) of tokens[B, T+1]; the gradients are a pytree like `parameters`.

        The gradients are those of the training objective: if train.z_loss is not 0, its term is included.
        `counted` and `segments` are those of `loss`.  Raises UserError as it does, and for a model held in int8.
        """
        require_unquantized(self.parameters, "differentiated")
        batch = self._sequences(tokens, counted, segments)
        return self._finished(self.functions.loss_and_gradients(self.parameters, *batch))

    def _sequences(
        self, tokens: Tokens, counted: Counted | None, segments: Segments | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """(tokens[B, T+1] -> int32[1, B', context+1], filled up with targets that are not counted; the segments)."""
        tokens, length = batch_tokens(tokens, counted, self.config.model), self.config.model.context + 1
        segments = None if segments is None else self._padded(checked_segments(segments, tokens), length)
        tokens = self._padded(tokens, length, filling=IGNORE)
        segments = with_free_space(segments, tokens, self.config.model)
        return tokens[None], None if segments is None else segments[None]

    def _padded(self, tokens: np.ndarray | None, length: int, filling: int = 0) -> np.ndarray | None:
        if tokens is None:
            return None
        missing = -tokens.shape[0] % self.config.mesh.dp, length - tokens.shape[1]
        return np.pad(tokens, [(0, missing[0]), (0, missing[1])], constant_values=filling)

    def _finished(self, result: Any) -> Any:
        return finished(self.mesh, result)


def from_pretrained(
    name: str | PathLike,
    *,
    adapter: str | PathLike | None = None,
    dp: int = 1,
    mp: int = 1,
    cp: int = 1,
    tensor_parallel: str = "all_reduce",
    zero: str = "none",
    dtype: str = "float32",
    context: int | None = None,
    processes: int = 1,
) -> Model:
    """The model in a Hugging Face directory, or of that name on the hub, on a (dp, cp, mp) mesh (docs/pretrained.md).

    `adapter` is a directory as PEFT writes it, with an adapter of this model.
    Weight matrices, activations and matrix products are of `dtype`, whatever the dtype of the files: float32, bfloat16,
    or auto, float32 on CPUs and bfloat16 elsewhere; int8 is auto with the matrices of the blocks held in int8
    (docs/pretrained.md).  Vectors, such as the scales of norms, are float32.  Training needs float32 weights: use
    `Trainer`, or leave dtype as it is.  `context` is the longest sequence, and what every call computes: by default the
    model's own limit, but not above 2048 for a rotary encoding.  Each of several `processes`, which have joined, calls
    this and reads its part.
    Raises UserError if the directory cannot be used, or the model does not suit the mesh.
    """
    given: dict[str, Any] = {"model.from_pretrained": compose.quoted(str(name)), "model.context": context}
    given |= {"mesh.dp": dp, "mesh.mp": mp, "mesh.cp": cp, "mesh.tensor_parallel": tensor_parallel, "mesh.zero": zero}
    given |= {"train.precision": environment.precision_of(dtype), "train.batch": dp, "mesh.processes": processes}
    found = None if adapter is None else open_adapter(str(adapter), open_source(str(name)))
    if found is not None:
        keys = "rank", "alpha", "scale"
        given |= {f"model.adapter.{key}": getattr(found.config, key) for key in keys}
        given["model.adapter.matrices"] = f"[{','.join(found.config.matrices)}]"
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
    config = load_config(*overrides, file=compose.CONF / "finetune.yaml")
    return Model.initialize(config, pretrained_dtype=dtype, adapter=found)


def run_training(config: Config, components: Components = CONFIGURED) -> bool:
    """A whole run as `shmap-tp train` makes it: data, evaluation, checkpoints, metrics and a report in run.dir.

    True if all steps were trained, False if the run was asked to stop and has saved; then checkpoint.resume=must
    continues it.  On accelerators the mesh must use all devices; on a CPU they are emulated, and the run may use the
    first dp x mp of those that there are, as after a `Trainer` in the same process.
    Raises UserError if the input cannot be used, and other errors of `shmap_tp.errors` as the command prints them.
    """
    from shmap_tp.training import loop  # here, since nothing else of the library needs it

    components = start.with_pretrained(config, components_of(config, components))
    return loop.train(config, components=components, make_sampler=make_training_sampler) == 0


def build(config: Config, components: Components) -> tuple[Config, Mesh, ModelFunctions]:
    config, mesh = environment.resolve(config)
    return config, mesh, build_model_functions(config, mesh, compute_dtype(config.train.precision), components)


def finished(mesh: Mesh, result: Any) -> Any:
    """`result`; on a CPU once it is computed: emulated devices can deadlock with several programs under way."""
    return jax.block_until_ready(result) if mesh.devices.flat[0].platform == "cpu" else result
