"""From a config.json to the `model` section of a configuration, and from a model to a config.json."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmap_tp.config.schema import ModelConfig
from shmap_tp.config.yaml_files import as_installed
from shmap_tp.data.text_directory import MODEL, TextDirectory
from shmap_tp.errors import UserError, shown
from shmap_tp.model.sharded_model import MODEL_PARTS
from shmap_tp.pretrained.families import FAMILIES
from shmap_tp.pretrained.family import ARCHITECTURE_KEYS, DEFAULT_CONTEXT, Family, plain
from shmap_tp.pretrained.source import SINGLE, Source, open_source

MAY_DIFFER = {key for key in ARCHITECTURE_KEYS if key.startswith("rotary_")}
"""Keys that may be given another value than config.json has, for example to train for a longer context."""


def model_options(source: Source) -> dict[str, Any]:
    """The keys of the `model` section that follow from config.json.

    The vocabulary is padded to a multiple of 128 and of the number of heads, which every possible mesh.mp divides.
    """
    options = source.family.options(source.config, source.config_file)
    return options | {
        "name": source.directory.name or str(source.directory),
        "vocabulary_multiple": math.lcm(128, options["heads"]),
        "context": default_context(source),
    }


def default_context(source: Source) -> int:
    """model.context where none is given.  Learned positions are kept whole."""
    longest = source.family.context_limit(source.config).tokens
    return min(longest, DEFAULT_CONTEXT) if source.family.rotary else longest


def derive_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that follow from the `from_pretrained` of a `model` section; `given` are the keys that it names.

    A section that names every key, as in the config.yaml of a run, does not need the directory.
    Raises UserError if the directory cannot be used, a key has another value there, or the context is too long.
    """
    name = given["from_pretrained"]
    if "width" in given and not Path(name).is_dir():
        return {}
    source = open_source(name)
    options = model_options(source)
    for key in sorted((ARCHITECTURE_KEYS - MAY_DIFFER) & given.keys() & options.keys()):
        if plain(given[key]) != plain(options[key]):
            raise UserError(
                f"model.{key}={shown(given[key])}, but it is {shown(options[key])} in {source.config_file} "
                f"(model.from_pretrained); leave it out{as_installed(', as conf/finetune.yaml does')}"
            )
    limit = source.family.context_limit(source.config)
    if given.get("context") is not None and given["context"] > limit.tokens:
        raise UserError(f"model.context={given['context']} is above {limit.reason} of {source.config_file}; lower it")
    return options


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
    """The JSON files of an adapter by their names, in place of config.json and what belongs to it."""


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
    listed = ", ".join(f"model.{key}={shown(a)} (there {shown(b)})" for key, (a, b) in differences.items())
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
        raise UserError(f"{model} has {' and '.join(parts)} of its own (Components), which no architecture can express")


def describe_target(model: ModelConfig) -> str:
    """Whether `model` can be exported, and as what, as a sentence for users."""
    try:
        return f"as {target_of(model, None).family.architecture}"
    except UserError:
        return f"not possible: transformers has no such architecture (it has those of model={', '.join(EXPORTABLE)})"
