"""What a model becomes in a Hugging Face directory: its architecture and its config.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shmap_tp.config.schema import ModelConfig
from shmap_tp.data.text_directory import MODEL, TextDirectory
from shmap_tp.errors import UserError, shown
from shmap_tp.model.components import MODEL_PARTS
from shmap_tp.pretrained.families import FAMILIES
from shmap_tp.pretrained.family import Family
from shmap_tp.pretrained.source import SINGLE, Source

EXPORTABLE = ("bytes_llama", "gpt2", "llama3_8b")
"""Some models of conf/model that can be exported, the smallest first."""


@dataclass(frozen=True)
class Target:
    """What a directory will contain besides the weights."""

    family: Family
    config: Mapping[str, Any]
    companions: Mapping[str, bytes] = field(default_factory=dict)
    """The files of the tokenizer, and generation_config.json, by name."""
    weights: str = SINGLE
    """The file of the weights, where they are not divided."""
    documents: Mapping[str, Any] | None = None
    """Of an adapter, the JSON files by their names, in place of config.json and what belongs to it."""


def target_of(model: ModelConfig, source: Source | None, text: TextDirectory | None = None) -> Target:
    """The family and config.json of `model`: those of `source`, if it was read from one.  For a model from nothing
    `text` has the files of its tokenizer (`for_export`), and the ids that begin and end a text.

    Raises UserError if no family can express the model.
    """
    if source is not None:
        config = dict(source.config)
        if model.positions == "learned":
            config[source.family.context_key] = model.context
        differences = source.family.differences(model, config)
        if not differences:
            return Target(source.family, config, _contents(source))
    candidates = [(family, family.config_of(model)) for family in FAMILIES]
    differing = [(family, config, family.differences(model, config)) for family, config in candidates]
    for family, config, differences in differing:
        if not differences:
            if source is not None:
                return Target(family, config, _contents(source))
            ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
            files = {} if text is None else text.files
            given = {} if text is None else text.values(MODEL)
            return Target(family, config | ids | given, {name: files[name] for name in files if name != MODEL})
    family, _, differences = min(differing, key=lambda one: ("config" in one[2], len(one[2])))
    listed = ", ".join(
        f"model.{key}={shown(mine)} (there {shown(theirs)})" for key, (mine, theirs) in differences.items()
    )
    raise UserError(
        f"no supported architecture can express model {model.name}; the closest, {family.architecture}, differs in "
        f"{listed};\ntrain with the values there, or another model, such as model="
        + ", ".join(name for name in EXPORTABLE if name != model.name)
    )


def _contents(source: Source) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in source.companions()}


def require_expressible(replaced: Sequence[str], model: str) -> None:
    """Raise UserError if parts of `model` are replaced by components, which transformers does not have."""
    if parts := [part for part in MODEL_PARTS if part in replaced]:
        raise UserError(
            f"{model} has {' and '.join(parts)} of its own (Components), which no supported architecture can express"
        )


def describe_target(model: ModelConfig) -> str:
    """Whether `model` can be exported, and as what, as a sentence for users."""
    try:
        return f"as {target_of(model, None).family.architecture}"
    except UserError:
        return f"not possible: transformers has no such architecture (it has those of model={', '.join(EXPORTABLE)})"
