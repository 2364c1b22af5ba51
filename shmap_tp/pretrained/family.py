"""A model family: a table of the keys of its config.json, and a table of its tensors.

Both tables are read in both directions: from config.json to the `model` section of a configuration and back, and from
the tensors of a file to parameters and back.  A key whose value changes what the model computes is in the table, or its
value is refused; it is never ignored.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from shmap_tp.config.schema import ModelConfig
from shmap_tp.errors import UserError
from shmap_tp.layers.positions import yarn_amplitude
from shmap_tp.pretrained import config_json
from shmap_tp.pretrained.layout import Layout, sizes_of

REQUIRED = object()
"""The default of a key that every config.json of the family has."""
DEFAULT_CONTEXT = 2048
"""model.context where none is given, unless the model's own limit is lower: every call computes the whole context."""

ARCHITECTURE_KEYS = frozenset(ModelConfig.__dataclass_fields__) - {
    *("name", "from_pretrained", "context", "vocabulary_multiple", "init_std"),
    *("remat", "offload", "attention", "attention_chunk", "adapter", "router_balance_loss", "router_z_loss"),
}
"""Keys of the `model` section that determine what is computed, and so follow from config.json."""

GELUS = {"gelu": "gelu_erf", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu"}
"""Names of activation functions, and ours.  GPT-NeoX-20B has gelu_fast."""

ATTENTION_KINDS = ("full_attention", "sliding_attention")
"""Values of layer_types."""

_SIZES = "width layers heads kv_heads head_dim ffn vocabulary rotary_dim experts experts_per_token"
SIZES = frozenset(_SIZES.split())
"""Keys of the `model` section that are integers above 0."""

_HARMLESS = """
    architectures model_type auto_map name_or_path transformers_version torch_dtype dtype tokenizer_class
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id prefix is_decoder
    use_cache output_attentions output_hidden_states output_scores return_dict return_dict_in_generate
    initializer_range problem_type id2label label2id num_labels task_specific_params finetuning_task
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    attention_dropout hidden_dropout attn_pdrop embd_pdrop resid_pdrop classifier_dropout
    attention_probs_dropout_prob hidden_dropout_prob custom_pipeline custom_pipelines max_sequence_length
    gradient_checkpointing pretraining_tp chunk_size_feed_forward is_llama_config max_window_layers n_ctx
    max_length min_length temperature top_k top_p do_sample num_beams repetition_penalty length_penalty
    no_repeat_ngram_size transformers.js_config unsloth_version unsloth_fixed reorder_and_upcast_attn
    cache_implementation
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keys that do not change the logits: names and versions, special tokens, generation, how transformers computes, and
dropout, which is active in training only (training here uses none).  So do names that begin with an underscore.
Special tokens and generation settings are copied as they are."""


@dataclass(frozen=True)
class Key:
    """A key of config.json and the key or keys of the `model` section with the same meaning."""

    theirs: str
    ours: tuple[str, ...]
    default: Any = REQUIRED
    """What an absent or null key means: a value, or a function of config.json."""
    values: Mapping[Any, Any] | None = None
    """Their values and ours, where they differ; others are not supported."""


@dataclass(frozen=True)
class TensorRow:
    """A parameter of ours and the tensor of a file that has it; {layer} stands for the number of the block, {expert}
    for that of an expert."""

    ours: str
    theirs: str
    pattern: str
    """The dims of their tensor and of our array, for one layer and one expert; see layout.py."""

    def divided(self, model: ModelConfig, stacked: bool) -> tuple[int, ...]:
        """The first dims of our array for each index of which there is a tensor; `stacked`: the first is layers."""
        layers = (model.layers,) if stacked else ()
        return (*layers, model.experts) if "{expert}" in self.theirs else layers

    def name(self, index: tuple[int, ...]) -> str:
        """The name of the tensor of an index of these dims."""
        return self.theirs.format(**dict(zip(("layer", "expert"), index, strict=False)))


def with_rows(rows: Iterable[TensorRow], *others: TensorRow) -> tuple[TensorRow, ...]:
    """`rows`, in which `others` take the place of those of the same parameters."""
    return (*(row for row in rows if row.ours not in {other.ours for other in others}), *others)


def with_bias(ours: str, theirs: str, weight: str, bias: str) -> tuple[TensorRow, TensorRow]:
    """The rows of a matrix and its bias, of these patterns."""
    return TensorRow(f"{ours}.weight", f"{theirs}.weight", weight), TensorRow(f"{ours}.bias", f"{theirs}.bias", bias)


def layer_norm(ours: str, theirs: str) -> tuple[TensorRow, TensorRow]:
    """The rows of a norm with a bias."""
    scale = TensorRow(f"{ours}.scale", f"{theirs}.weight", "d -> d")
    return scale, TensorRow(f"{ours}.bias", f"{theirs}.bias", "d -> d")


MOST_LAYERS = 10_000
"""A pattern lists all layers: a damaged number would exhaust the memory."""


@dataclass(frozen=True)
class ContextLimit:
    """The longest sequence that a model can be used with, and why."""

    tokens: int
    reason: str

    @classmethod
    def of(cls, key: str, value: Any) -> "ContextLimit":
        """The limit that a key of config.json sets.  Raises UserError if its value is not a number of tokens."""
        return cls(config_json.checked(config_json.SIZE, value, key, "config.json"), f"{key}={value}")


@dataclass(frozen=True)
class Family:
    """One architecture of `transformers`."""

    architecture: str
    model_type: str
    keys: tuple[Key, ...]
    fixed: Mapping[str, Any]
    """Keys of the `model` section that have this value in the whole family."""
    rows: tuple[TensorRow, ...]
    context_key: str = "max_position_embeddings"
    """The key of config.json with the longest context."""
    prefix: str = "model."
    """What the names of tensors begin with, except where the model was saved without its head."""
    rotary: config_json.RotaryKeys | config_json.LocalRotaryKeys | None = None
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of config.json that may be absent, and the values of them that are supported."""
    ignored: frozenset[str] = frozenset()
    """Keys of config.json that `window` reads or `derived`, or that have no effect in this family."""
    buffers: str = r"\.rotary_emb\.inv_freq$"
    """Names of tensors that are no parameters: old files have them, and they are skipped."""
    window: Callable[[Mapping[str, Any]], ContextLimit | None] = lambda config: None
    """The sliding window of a config.json where longer sequences are not supported: within it, attention is to all
    earlier positions."""
    derived: Callable[[Mapping[str, Any], str], Mapping[str, Any]] = lambda config, where: {}
    """Keys of the `model` section that no one key of config.json determines, of (config.json, where it is)."""
    write: Callable[[ModelConfig], Mapping[str, Any]] = lambda model: {}
    """Keys of config.json that follow from the model and are in no table."""

    def options(self, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The keys of the `model` section, without context, that `config`, the content of `where`, determines.

        Raises UserError for a key or a value that is not supported, or a key that is missing.
        """
        self._check_sizes(config, where)
        self._check_layer_types(config, where)
        found = dict(self.fixed)
        for key in self.keys:
            value = config.get(key.theirs)
            if value is None:
                value = key.default(config) if callable(key.default) else key.default
            if key.values is None:
                value = config_json.value_for(key.ours[0], value, key.theirs, where)
            else:
                config_json.require_one_of(key.values, key.theirs, value, where, self.architecture)
                value = key.values[value]
            found |= dict.fromkeys(key.ours, value)
        found |= self.derived(config, where)
        if self.rotary:
            found |= self.rotary.read(config, found["head_dim"], where)
        self._refuse_unknown(config, where)
        return found

    def _check_sizes(self, config: Mapping[str, Any], where: str) -> None:
        """Raises UserError if a size is missing, or is not an integer above 0."""
        required = [key.theirs for key in self.keys if key.default is REQUIRED] + [self.context_key]
        optional = [key.theirs for key in self.keys if SIZES.intersection(key.ours)]
        optional += ["sliding_window", "sliding_window_pattern"]
        for name in [*required, *optional]:
            value = config.get(name)
            rule = f"is missing, which every {self.architecture} has"
            config_json.require(value is not None or name not in required, name, value, rule, where)
            if value is not None:
                config_json.checked(config_json.SIZE, value, name, where)
        for name in (key.theirs for key in self.keys if "layers" in key.ours):
            rule = f"must be at most {MOST_LAYERS}; copy the file again"
            config_json.require(config[name] <= MOST_LAYERS, name, config[name], rule, where)

    def _check_layer_types(self, config: Mapping[str, Any], where: str) -> None:
        """Raises UserError unless they are known, and as many as layers."""
        kinds = config.get("layer_types")
        if not kinds or "layer_types" not in self.ignored:
            return
        for kind in config_json.checked(config_json.LIST, kinds, "layer_types", where):
            config_json.require_one_of(ATTENTION_KINDS, "layer_types", kind, where)
        layers = config["num_hidden_layers"]
        rule = f"has {len(kinds)} elements, but num_hidden_layers={layers}"
        config_json.require(len(kinds) == layers, "layer_types", None, rule, where)

    def _refuse_unknown(self, config: Mapping[str, Any], where: str) -> None:
        known = HARMLESS | {key.theirs for key in self.keys} | {self.context_key} | self.ignored
        known |= self.rotary.names if self.rotary else set()
        for name, value in config.items():
            if name in self.only and value is not None:
                config_json.require_one_of(self.only[name], name, value, where, self.architecture)
            rule = (
                f"is not a key that shmap_tp knows for {self.architecture}; if it does not change what the model "
                f"computes, remove it from a copy of the file"
            )
            is_known = name in known | self.only.keys() or name.startswith("_")
            config_json.require(is_known or value in (None, False), name, value, rule, where)

    def context_limit(self, config: Mapping[str, Any]) -> ContextLimit:
        """The longest context of the model of `config`.  Raises UserError if it is not a number of tokens."""
        found = ContextLimit.of(self.context_key, config.get(self.context_key)), self.window(config)
        return min((limit for limit in found if limit), key=lambda limit: limit.tokens)

    def config_of(self, model: ModelConfig) -> dict[str, Any]:
        """A config.json that describes `model` as closely as the family can; `differences` tells how close it is."""
        # no padding token: the default of the class may lie beyond the vocabulary, which transformers refuses
        config: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        config["pad_token_id"] = None
        values = normalized({key: getattr(model, key) for key in ARCHITECTURE_KEYS})
        for key in self.keys:
            value = values[key.ours[0]]
            if key.values is not None:
                value = next((theirs for theirs, ours in key.values.items() if ours == value), None)
            config[key.theirs] = value
        config[self.context_key] = model.context
        if self.rotary:
            config |= self.rotary.write(model)
        return config | self.write(model)

    def differences(self, model: ModelConfig, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Keys of the `model` section in which `model` differs from the model of `config`: (model's, config's)."""
        try:
            requested = self.options(config, "config.json")
        except UserError as error:
            return {"config": (None, str(error))}
        ours = normalized({key: getattr(model, key) for key in ARCHITECTURE_KEYS})
        theirs = normalized({key: getattr(model, key) for key in ARCHITECTURE_KEYS} | NEUTRAL | requested)
        return {key: (ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]}

    def layouts(self, model: ModelConfig, paths: Iterable[str]) -> dict[str, tuple[TensorRow, Layout]]:
        """For each parameter path its row, and its layout.  Raises UserError if a parameter has no row."""
        rows, sizes = {row.ours: row for row in self.rows}, sizes_of(model)
        for path in paths:
            if path not in rows:
                raise UserError(f"{self.architecture} has no tensor for the parameter {path} of model {model.name}")
        return {path: (rows[path], Layout(rows[path].pattern, sizes)) for path in paths}

    @property
    def head(self) -> str:
        """The name of the tensor of the output head."""
        return next(row.theirs for row in self.rows if row.ours == "head.weight")

    def is_skipped(self, name: str, paths: Iterable[str]) -> bool:
        """Whether the tensor `name` is no parameter: a buffer, or the head of a model that ties it to the embedding."""
        return bool(re.search(self.buffers, name)) or (name == self.head and "head.weight" not in paths)


_OFF = "norm_bias qkv_bias attention_output_bias mlp_bias head_bias qk_norm qk_norm_across_heads attention_sinks"
_NONE = "window attention_softcap attention_scale_dim logit_softcap router_bias_rate rotary_dim rotary_amplitude"
NEUTRAL = dict.fromkeys((*_OFF.split(), "tie_embeddings"), False) | dict.fromkeys((*_NONE.split(), "rotary_local_base"))
NEUTRAL |= {"rotary_pairing": "half", "rotary_scaling": "none", "norm_placement": "before", "layer_pattern": ()}
NEUTRAL |= {"experts": 0, "shared_expert_ffn": 0, "router_scores": "softmax", "router_normalize": True}
NEUTRAL["embedding_scale"] = 1.0
"""The value of a key that a family does not name."""


def plain(value: Any) -> Any:
    """An enum's value, anything else as it is."""
    return value.value if isinstance(value, Enum) else value


def normalized(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with one value for one meaning: rotary keys that have no effect are null, defaults are written out."""
    found = {key: plain(value) for key, value in options.items()}
    if found["norm_epsilon"] is None:
        found["norm_epsilon"] = 1e-5 if found["norm"] == "layernorm" else 1e-6
    if found["rotary_dim"] is None:
        found["rotary_dim"] = found["head_dim"]
    found["layer_pattern"] = config_json.shortest_pattern([plain(kind) for kind in found["layer_pattern"]])
    if found["attention_scale_dim"] is None:
        found["attention_scale_dim"] = found["head_dim"]
    if found["rotary_local_base"] == found["rotary_base"] and found["rotary_scaling"] == "none":
        found["rotary_local_base"] = None
    if not found["experts"]:
        found |= {"experts_per_token": None, "router_scores": None, "router_normalize": None}
    without_effect = [key for key in found if key.startswith("rotary_")]
    if found["positions"] == "rotary":
        used = config_json.SCALINGS[found["rotary_scaling"]].values() if found["rotary_scaling"] != "none" else ()
        without_effect = [key for key in config_json.LLAMA3.values() if key not in used]
        if not found["rotary_scaling"].startswith("yarn"):
            without_effect.append("rotary_amplitude")
        elif found["rotary_amplitude"] is None:
            found["rotary_amplitude"] = yarn_amplitude(found["rotary_scaling_factor"])
    return found | dict.fromkeys(without_effect)
