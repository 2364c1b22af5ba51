"""Tiny models of every family, as transformers describes them: config.json, the tensors, and logits at some positions.

`tests/pretrained/reference/*.json` are written by tests/pretrained/make_reference.py with transformers, so that tests
without it can read the models and compare their logits.  The weights are random numbers that follow from the tensors'
names: logits that spread by more than 5, biases that are not 0, norms that are not 1, and gates beyond the limit of
gpt-oss.
"""

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

import shmap_tp
from shmap_tp.config.choices import Precision
from shmap_tp.config.schema import Config
from shmap_tp.parallel.weights import is_int8
from shmap_tp.pretrained.tensor_files import DTYPES
from shmap_tp.training.model_functions import ModelFunctions, build_model_functions
from shmap_tp.training.step import CONFIGURED, Components

REFERENCE = Path(__file__).parents[1] / "pretrained" / "reference"
CONTEXT, VOCABULARY = 512, 97
POSITIONS = (0, 1, 5, 63, 127, 256, 383, 511)
"""Where the reference logits of the first sequence are recorded."""


def _rope(base: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base}


_SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
_LLAMA = _SIZES | {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
_LOCAL = ["sliding_attention"]
_GEMMA = _LLAMA | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 100}
_NEOX = _SIZES | {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 8}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = _rope(100.0) | {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "factor": 8.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA | {"rope_parameters": _LLAMA3}),
    "llama_tied": ("llama", _LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", _LLAMA | {"sliding_window": 100, "head_dim": 8}),
    "qwen2": ("qwen2", _LLAMA | {"head_dim": 16, "rope_parameters": _YARN}),
    "qwen3": ("qwen3", _LLAMA | {"head_dim": 16}),
    "mixtral": ("mixtral", _LLAMA | {"intermediate_size": 24, "num_local_experts": 8}),
    "qwen3_moe": (
        "qwen3_moe",
        _LLAMA
        | {"head_dim": 16, "moe_intermediate_size": 12, "num_experts": 16, "num_experts_per_tok": 5}
        | {"norm_topk_prob": False},
    ),
    "gemma": ("gemma", _LLAMA | {"head_dim": 16}),
    "gemma2": ("gemma2", _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": (
        "gemma3_text",
        _GEMMA
        | {"num_hidden_layers": 5, "layer_types": [*_LOCAL, *_LOCAL, "full_attention", *_LOCAL, *_LOCAL]}
        | {"rope_parameters": {_LOCAL[0]: _rope(100.0), "full_attention": _rope(50_000.0) | _LINEAR}},
    ),
    "olmo2": ("olmo2", _LLAMA),
    "olmo3": (
        "olmo3",
        _LLAMA
        | {"num_hidden_layers": 4, "sliding_window": 100}
        | {"rope_parameters": {_LOCAL[0]: _rope(50.0), "full_attention": _YARN}},
    ),
    "olmoe": ("olmoe", _LLAMA | {"intermediate_size": 12, "num_experts": 16, "num_experts_per_tok": 5}),
    "phi3": (
        "phi3",
        _LLAMA
        | {"sliding_window": 100, "pad_token_id": 0}
        | {"rope_parameters": _rope(10_000.0) | {"partial_rotary_factor": 0.75}},
    ),
    "gpt_oss": (
        "gpt_oss",
        _LLAMA
        | {"head_dim": 16, "intermediate_size": 12, "num_local_experts": 16, "num_experts_per_tok": 5}
        | {"sliding_window": 100, "rope_parameters": _YARN | {"truncate": False}},
    ),
    "smollm3": ("smollm3", _LLAMA | {"num_hidden_layers": 5, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "gpt2": ("gpt2", {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 48, "n_layer": 3, "n_head": 8}),
    "gpt_neox": ("gpt_neox", _NEOX | {"rotary_pct": 0.5}),
    "gpt_neox_sequential": ("gpt_neox", _NEOX | {"rotary_pct": 0.25, "use_parallel_residual": False}),
    "gptj": (
        "gptj",
        {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 3, "n_head": 8, "rotary_dim": 4},
    ),
}
"""The model_type of transformers, and what its configuration is made with."""


BUILT: dict[Any, ModelFunctions] = {}


def shared_model_functions(
    config: Config, mesh: Mesh, dtype: DTypeLike, components: Components = CONFIGURED
) -> ModelFunctions:
    """`build_model_functions`, or what it made before of the same model in another directory."""
    of_file = config.model.from_pretrained is not None
    model = replace(config.model, name="", from_pretrained=None)
    train = replace(config.train, batch=0, steps=0, precision=Precision.auto)  # that is `dtype`
    key = repr((of_file, model, config.mesh, train, config.run.seed)), mesh, dtype, components
    if key not in BUILT:
        BUILT[key] = build_model_functions(config, mesh, dtype, components)
    return BUILT[key]


def tokens() -> np.ndarray:
    """tokens[2, 513] for every model."""
    return np.random.default_rng(7).integers(0, VOCABULARY, (2, CONTEXT + 1))


def reference(case: str) -> dict[str, Any]:
    """The record of a case: "config", "tensors" (shapes by name), "logits" [positions, vocabulary], "spread"."""
    record = json.loads((REFERENCE / f"{case}.json").read_text())
    return record | {"logits": np.array(record["logits"], np.float32)}


def weight(name: str, shape: tuple[int, ...], case: str) -> np.ndarray:
    """The random tensor of that name, float32."""
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    if len(shape) == 1:
        is_scale = name.endswith("weight") and not case.startswith("gemma")
        return (0.3 * values + is_scale).astype(np.float32)
    spread = 3 if name.endswith(("lm_head.weight", "embed_out.weight")) else 1
    spread = 2 if name.endswith("experts.gate_up_proj") else spread
    return (spread * values * shape[-1] ** -0.5).astype(np.float32)


def in_files(parameter: str, values: np.ndarray, case: str) -> dict[str, np.ndarray]:
    """The tensors of files that have a parameter of transformers, views of its values: its matrices of all experts are
    one array, gate and up together."""
    if ".experts." not in parameter or case == "gpt_oss":
        name = parameter.replace("mlp.gate", "block_sparse_moe.gate") if case == "mixtral" else parameter
        return {name.replace("lm_head.", "embed_out.") if case.startswith("gpt_neox") else name: values}
    module, kind = parameter.rsplit(".", 1)
    module = module.replace("mlp", "block_sparse_moe") if case == "mixtral" else module
    gate, up, down = ("w1", "w3", "w2") if case == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    parts = np.split(values, 2, axis=1) if kind == "gate_up_proj" else [values]
    names = (gate, up) if kind == "gate_up_proj" else (down,)
    of_names = zip(names, parts, strict=True)
    return {f"{module}.{e}.{name}.weight": part[e] for name, part in of_names for e in range(len(values))}


def write_directory(directory: Path, case: str, *, dtype: str = "F32", changed: dict[str, Any] | None = None) -> Path:
    """Write the model of a case as a Hugging Face directory, with `changed` keys of config.json."""
    record = reference(case)
    tensors = {name: weight(name, tuple(shape), case) for name, shape in record["tensors"].items()}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(record["config"] | (changed or {})))
    write_tensors(directory / "model.safetensors", tensors, dtype)
    return directory


def write_tensors(file: Path, tensors: dict[str, np.ndarray], dtype: str = "F32") -> None:
    """Write a safetensors file, as its format says."""
    header, blocks, offset = {}, [], 0
    for name, values in tensors.items():
        data = values.astype(DTYPES[dtype]).tobytes()
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, offset + len(data)]}
        blocks.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blocks))


def dequantized(model: shmap_tp.Model) -> shmap_tp.Model:
    """The model with an array of float32 in the place of each weight of int8."""
    whole = jax.tree.map(lambda w: w.astype(jnp.float32) if is_int8(w) else w, model.parameters, is_leaf=is_int8)
    return model.with_parameters(whole)


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of the safetensors files in `directory`, read as the format says."""
    found = {}
    codes = {"F32": np.float32, "F64": np.float64, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    for file in sorted(directory.glob("*.safetensors")):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                values = np.frombuffer(data[8 + length + start : 8 + length + stop], codes[entry["dtype"]])
                assert name not in found
                found[name] = values.reshape(entry["shape"])
    return found


def assert_same_tensors(directory: Path, expected: Path) -> None:
    """The tensors in the files of two directories have the same names and bits."""
    found, wanted = read_tensors(directory), read_tensors(expected)
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()]


def model_error(model: shmap_tp.Model, case: str) -> float:
    """The largest difference from the logits of transformers, as a fraction of the largest logit."""
    expected = reference(case)["logits"]
    found = np.asarray(model.logits(tokens()[:1, :-1]))[0, POSITIONS]
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))


def logit_error(directory: Path, case: str, **mesh: object) -> float:
    """The error of the logits of the model in `directory`."""
    return model_error(shmap_tp.from_pretrained(directory, **mesh), case)
