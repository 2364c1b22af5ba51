"""Chat templates in the manner of eight families, written from their public descriptions, and a tokenizer for them."""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.pretrained_models import read_tensors, weight, write_directory, write_tensors

VOCABULARY = 320

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def with_default_system(text: str) -> str:
    """ChatML that begins with a system message in any case."""
    system = "<|im_start|>system\n" + text + "<|im_end|>\n"
    return "{% if messages[0]['role'] != 'system' %}{{ '" + system.replace("\n", "\\n") + "' }}{% endif %}" + CHATML


@dataclass(frozen=True)
class ChatFamily:
    template: str
    special: tuple[str, ...]
    """Special tokens; the id of each is 256 and more."""
    end: str
    """The token that ends an assistant turn."""
    eos: str
    """eos_token of tokenizer_config.json."""
    bos: str | None = None
    separator: str = "<|endoftext|>"
    """What is expected between conversations."""
    system: bool = True
    """Whether there may be a system message."""


FAMILIES = {
    "llama3": ChatFamily(
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
        "m['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        end="<|eot_id|>",
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        separator="<|end_of_text|>",
    ),
    "qwen2.5": ChatFamily(
        with_default_system("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        end="<|im_end|>",
        eos="<|im_end|>",
    ),
    # What was thought is left out of turns before the last question; the last answer begins with it, if only empty.
    "qwen3": ChatFamily(
        "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = "
        "loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% set said = m.content.split('</think>')[-1]"
        ".lstrip('\n') %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role != 'assistant' %}{{ m.content }}"
        "{% elif loop.index0 > ns.asked %}{{ '<think>\n' + m.content.split('</think>')[0].split('<think>')[-1]"
        ".strip('\n') * ('</think>' in m.content) + '\n</think>\n\n' + said }}{% else %}{{ said }}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        end="<|im_end|>",
        eos="<|im_end|>",
    ),
    "gemma": ChatFamily(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
        "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim + "
        "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        end="<end_of_turn>",
        eos="<eos>",
        bos="<bos>",
        separator="<eos>",
        system=False,
    ),
    "mistral": ChatFamily(
        "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}",
        ("<unk>", "<s>", "</s>"),
        end="</s>",
        eos="</s>",
        bos="<s>",
        separator="<unk>",
        system=False,
    ),
    "smollm2": ChatFamily(
        with_default_system("You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        end="<|im_end|>",
        eos="<|im_end|>",
    ),
    "chatml": ChatFamily(
        CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), end="<|im_end|>", eos="<|endoftext|>"
    ),
    "zephyr": ChatFamily(
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        ("<unk>", "<s>", "</s>"),
        end="</s>",
        eos="</s>",
        separator="<unk>",
    ),
}


def write_chat_model(directory: Path, family: ChatFamily, *, template: str | None = None) -> Path:
    """Write a tiny Llama with a vocabulary of the 256 bytes and the special tokens of `family`, and its template."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([*family.special])
    write_directory(directory, "llama", changed={"vocab_size": VOCABULARY, "max_position_embeddings": 512})
    shapes = {name: values.shape for name, values in read_tensors(directory).items()}
    larger = {name: (VOCABULARY, shape[1]) if shape[0] == 97 else shape for name, shape in shapes.items()}
    write_tensors(directory / "model.safetensors", {name: weight(name, larger[name], "llama") for name in larger})
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": family.template if template is None else template, "eos_token": family.eos}
    config |= {} if family.bos is None else {"bos_token": family.bos}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
