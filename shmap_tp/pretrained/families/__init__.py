"""The model families that can be read and written.  A new one is a file of tables, and an entry here."""

from shmap_tp.errors import UserError, shown
from shmap_tp.pretrained.config_json import LIST, checked, require_one_of
from shmap_tp.pretrained.families.gemma import GEMMA, GEMMA2, GEMMA3
from shmap_tp.pretrained.families.gpt import GPT2, GPT_NEOX, GPTJ
from shmap_tp.pretrained.families.gpt_oss import GPT_OSS
from shmap_tp.pretrained.families.llama import LLAMA, MISTRAL, MIXTRAL, PHI3, SMOLLM3
from shmap_tp.pretrained.families.olmo import OLMO2, OLMO3, OLMOE
from shmap_tp.pretrained.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from shmap_tp.pretrained.family import Family

FAMILIES = [
    *(LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, GPT_NEOX, GPTJ, GEMMA, GEMMA2, GEMMA3, MIXTRAL, QWEN3_MOE, SMOLLM3),
    *(OLMO2, OLMO3, OLMOE, PHI3, GPT_OSS),
]
"""In the order in which a family is chosen for a model that was not read from a Hugging Face directory."""


def find_family(config: dict, where: str) -> Family:
    """The family of a config.json, the content of `where`.  Raises UserError for one that is not in the list, and where
    model_type, by which transformers chooses, is that of another architecture."""
    architectures, model_type = config.get("architectures") or [], config.get("model_type")
    checked(LIST, architectures, "architectures", where)
    for family in FAMILIES:
        is_named = family.architecture in architectures
        if is_named and model_type is not None:
            require_one_of([family.model_type], "model_type", model_type, where, family.architecture)
        if is_named or (not architectures and family.model_type == model_type):
            return family
    named = ", ".join(map(str, architectures)) or f"model_type={model_type}"
    known = ", ".join(family.architecture for family in FAMILIES)
    raise UserError(f"{where}: the architecture {shown(named)} is not supported; supported are {known}")
