"""SmolLM3: Llama, but with no rotary encoding in every fourth layer."""

from collections.abc import Mapping
from typing import Any

from shmap_tp.config.schema import ModelConfig
from shmap_tp.errors import UserError, shown
from shmap_tp.pretrained.config_json import RotaryKeys, size
from shmap_tp.pretrained.families.llama import FIXED, LLAMA, SHAPE
from shmap_tp.pretrained.family import Family, Key
from shmap_tp.pretrained.layer_types import repeated, shortest_pattern


def _derived(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    layers, interval, has_rotary = (
        config.get(key) for key in ("num_hidden_layers", "no_rope_layer_interval", "no_rope_layers")
    )
    if has_rotary is None:
        interval = size(4 if interval is None else interval, "no_rope_layer_interval", where)
        has_rotary = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(has_rotary, list) or len(has_rotary) != layers or any(one not in (0, 1) for one in has_rotary):
        raise UserError(
            f"{where}: no_rope_layers={shown(has_rotary)} must be a list of num_hidden_layers={layers} "
            f"numbers, 1 for a layer with the rotary encoding and 0 for one without"
        )
    if "sliding_attention" in (kinds := config.get("layer_types") or []):
        raise UserError(f"{where}: layer_types={shown(kinds)} is not supported; supported is full_attention")
    kinds = shortest_pattern(["global" if one else "nope" for one in has_rotary])
    return {"layer_pattern": [] if kinds == ["global"] else kinds}


def _write(model: ModelConfig) -> dict[str, Any]:
    return {"no_rope_layers": [int(kind != "nope") for kind in repeated(model.layer_pattern, model.layers)]}


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    keys=(
        *(key for key in SHAPE if key.theirs != "tie_word_embeddings"),
        Key("tie_word_embeddings", ("tie_embeddings",), True),
        *LLAMA.keys[len(SHAPE) :],
    ),
    fixed=FIXED,
    context_key="max_position_embeddings",
    rows=LLAMA.rows,
    prefix="model.",
    rotary=RotaryKeys(default_base=2e6),
    only={"use_sliding_window": (False,)},
    ignored=frozenset({"no_rope_layers", "no_rope_layer_interval", "layer_types", "sliding_window"}),
    derived=_derived,
    write=_write,
)
