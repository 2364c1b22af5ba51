"""Multimodal checkpoints: their text model is read as its own family, and the weights of other parts are skipped.

transformers 4     language_model.model.layers...     vision_tower...          multi_modal_projector...
transformers 5     model.language_model.layers...     model.vision_tower...    model.multi_modal_projector...
"""

import re
from collections.abc import Mapping
from typing import Any

from shmap_tp.pretrained.config_json import section
from shmap_tp.pretrained.tensor_files import StoredTensor

_GEMMA3 = {
    **{"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072},
}
TEXT_OF = {"Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", "gemma3_text", _GEMMA3)}
"""Architectures: (that of their text model, its model_type, what keys mean that its text_config does not have)."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that are beside text_config."""
_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_TEXT = re.compile(r"(model\.language_model|language_model\.model)\.")


def text_config(config: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]] | None:
    """(the multimodal architecture, the config.json of its text model); None for a config.json of another kind."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    named = [name for name in names if isinstance(name, str) and name in TEXT_OF]
    if not named:
        return None
    architecture, model_type, defaults = TEXT_OF[named[0]]
    text = {key: config[key] for key in TOKENS if key in config}
    text |= {key: value for key, value in section(config.get("text_config"), "text_config", where).items()}
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return named[0], defaults | text | tied | {"architectures": [architecture], "model_type": model_type}


def text_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Those of the text model, by the names that they have in a checkpoint of its own."""
    return {
        _TEXT.sub("model.", name.replace("language_model.lm_head.", "lm_head.")): tensor
        for name, tensor in tensors.items()
        if not _OTHER_PARTS.match(name)
    }
