"""The configuration of a model that is read from a Hugging Face directory."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shmap_tp.config.packaged import as_installed
from shmap_tp.errors import UserError, shown
from shmap_tp.pretrained.family import ARCHITECTURE_KEYS, DEFAULT_CONTEXT, plain
from shmap_tp.pretrained.source import Source, open_source

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
        raise UserError(
            f"model.context={given['context']} is above {limit.reason} of {source.config_file}; use at most "
            f"{limit.tokens}"
        )
    return options
