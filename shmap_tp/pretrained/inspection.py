"""The report of `python -m shmap_tp.pretrained inspect` on a Hugging Face directory."""

import textwrap
from dataclasses import replace

import jax

from shmap_tp.config import compose
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import validate
from shmap_tp.data.subwords import read_subwords
from shmap_tp.errors import UserError
from shmap_tp.model.flops import parameter_terms
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.parallel.partitioning import is_stacked
from shmap_tp.pretrained.configuration import derive_model
from shmap_tp.pretrained.family import NEUTRAL, plain
from shmap_tp.pretrained.reading import find_tensors, paths_of
from shmap_tp.pretrained.source import Source, open_source
from shmap_tp.training.environment import compute_dtype
from shmap_tp.training.model_functions import build_model_functions

MAX_MP = 64
"""The largest tensor-parallel size that is tried."""
SHOWN = (
    *("width", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocabulary", "block", "norm", "norm_epsilon", "mlp"),
    *("positions", "rotary_base", "rotary_dim", "rotary_pairing", "rotary_scaling", "tie_embeddings", "qk_norm"),
    *("qk_norm_across_heads", "norm_placement", "window"),
    *("norm_bias", "qkv_bias", "attention_output_bias", "mlp_bias", "head_bias", "embedding_scale"),
)
"""Keys of the `model` section that are printed, if they have an effect."""


def inspect(name: str) -> str:
    """The shape of the model in `name`, its parameters, the meshes that fit, and its weights and tokenizer.

    Raises UserError for what is not supported, and for weights that are missing or damaged.
    """
    source = open_source(name)
    config = _config(name)
    model, terms = config.model, parameter_terms(config.model)
    options = {key: plain(getattr(model, key)) for key in SHOWN}
    shown = [f"{key}={value}" for key, value in options.items() if value not in (None, False, NEUTRAL.get(key))]
    limit = source.family.context_limit(source.config)
    lines = [f"{source.directory}: {source.family.architecture}", *filter(None, [source.skipped]), ""]
    lines += textwrap.wrap(" ".join(shown), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    lines += [f"  context up to {limit.tokens} ({limit.reason}); {model.context} unless model.context is given", ""]
    lines += [f"  {what:<24}{count:>16,}" for what, count in terms.items() if count]
    lines += [f"  {'parameters':<24}{sum(terms.values()):>16,}", ""]
    fitting, refusal = _fitting_mp(config)
    lines += [f"  mesh.mp in {{{', '.join(map(str, fitting))}}}" + (f"; {refusal}" if refusal else ""), ""]
    return "\n".join([*lines, *(f"  {line}" for line in (_weights(source, config), _tokenizer(source)))])


def _config(name: str) -> Config:
    overrides = ["model=pretrained", f"model.from_pretrained={compose.quoted(name)}", "mesh.dp=1", "mesh.mp=1"]
    return compose.load(compose.CONF / "base.yaml", overrides, derive_model)


def _fitting_mp(config: Config) -> tuple[list[int], str | None]:
    """The tensor-parallel sizes up to MAX_MP that the model can be sharded over; why the first other one does not
    fit."""
    fitting, refusal = [], None
    for mp in range(1, MAX_MP + 1):
        try:
            validate(replace(config, mesh=replace(config.mesh, mp=mp)))
            fitting.append(mp)
        except UserError as error:
            refusal = refusal or str(error).partition(";")[0]  # without the sizes that fit this one rule
    return fitting, refusal


def _weights(source: Source, config: Config) -> str:
    """One line about the weights, once each has its place."""
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    shapes = build_model_functions(config, mesh, compute_dtype(config.train.precision)).shapes
    find_tensors(source, config.model, paths_of(is_stacked(shapes)))
    tensors = source.tensors.values()
    files, dtypes = {tensor.file for tensor in tensors}, sorted({str(tensor.dtype) for tensor in tensors})
    size = sum(tensor.size for tensor in tensors)
    what = f"{len(tensors)} tensors of {', '.join(dtypes)}, {size / 1e9:.2f} GB in {len(files)} file(s)"
    return f"weights: {what}, complete"


def _tokenizer(source: Source) -> str:
    """One line about the tokenizer.  Raises UserError if it has ids that the model does not have."""
    file = source.directory / "tokenizer.json"
    if not file.is_file():
        return "tokenizer: no tokenizer.json"
    highest = read_subwords(file.read_bytes(), str(file)).vocabulary - 1
    vocabulary = source.config["vocab_size"]
    if highest >= vocabulary:
        raise UserError(f"{file} has the id {highest}, but vocab_size={vocabulary} of the model must be above it")
    return f"tokenizer: tokenizer.json, ids up to {highest}"
