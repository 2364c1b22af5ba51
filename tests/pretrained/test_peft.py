"""Adapters in PEFT's files: the same bits in and out, for every table of tensors, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shmap_tp
from shmap_tp.errors import UserError
from shmap_tp.model.adapters import split_factors
from shmap_tp.pretrained.reading import load_parameters
from shmap_tp.pretrained.source import open_source
from tests.helpers import pretrained_models as models
from tests.helpers.adapter_cases import merged
from tests.helpers.assertions import assert_close, assert_same_bits, by_path
from tests.helpers.paths import ROOT

RANK, IDS = 3, models.tokens()[:1, :32]
FILES = {"adapter_model.safetensors", "adapter_config.json", "base.json"}
FUSED = {"gpt2": "attn.c_attn", "gpt_neox": "attention.query_key_value"}
CONTEXT = {"gpt2": 512}
"""Learned positions are kept whole."""


def adapted(base: Path, case: str, *settings: str, shared: bool = False) -> shmap_tp.Model:
    """The model of `base` on the mesh (2, 4) with random factors; `shared`: a of q, k and v are the same."""
    given = [f"model.from_pretrained={base}", f"model.adapter.rank={RANK}", "mesh.dp=2", "mesh.mp=4", *settings]
    given.append(f"model.context={CONTEXT.get(case, 32)}")
    config = shmap_tp.load_config(*given, file=ROOT / "conf" / "finetune.yaml")
    mesh, source = shmap_tp.make_mesh(config), open_source(str(base))
    functions, random = models.shared_model_functions(config, mesh, jnp.float32), np.random.default_rng(3)
    shapes, frozen = split_factors(functions.shapes)
    values = jax.tree.map(lambda leaf: random.normal(0, 0.1, leaf.shape).astype(np.float32), shapes)
    if shared:
        attention = values.blocks.attention
        values = eqx.tree_at(
            lambda params: [getattr(params.blocks.attention, name).adapter.a for name in ("key", "value")],
            values,
            [attention.query.adapter.a] * 2,
        )
    factors = jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), values, shapes)
    parameters = eqx.combine(factors, load_parameters(source, config.model, frozen))
    return shmap_tp.Model(config, mesh, parameters, functions, source)


def read(base: Path, adapter: Path, case: str, **mesh: Any) -> shmap_tp.Model:
    return shmap_tp.from_pretrained(base, adapter=adapter, context=CONTEXT.get(case, 32), **mesh)


@pytest.mark.parametrize("case", ["llama_tied", "gpt2", "gptj", "phi3", "mixtral"])
def test_an_adapter_is_written_and_read_with_the_same_bits_and_merged_into_the_same_model(tmp_path, case):
    base = models.write_directory(tmp_path / "base", case)
    of_experts = ["model.adapter.matrices=[attention]"] if case == "mixtral" else []
    model = adapted(base, case, "model.adapter.scale=sqrt_rank", *of_experts)
    model.save_pretrained(tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == FILES
    found = read(base, tmp_path / "out", case, dp=2, mp=2 if case == "llama_tied" else 4)
    assert_same_bits(found.parameters, model.parameters)
    found.save_pretrained(tmp_path / "again")
    assert all((tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in FILES)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["use_rslora"], config["lora_alpha"]) == (False, 16 * RANK**0.5)
    if case == "gpt2":
        model.save_pretrained(tmp_path / "rslora", rslora=True)
        config = json.loads((tmp_path / "rslora" / "adapter_config.json").read_text())
        assert (config["use_rslora"], config["lora_alpha"]) == (True, 16)
        for refused, merge in ((found, False), (model, True)):
            with pytest.raises(UserError, match=r"rslora is for adapters of model.adapter.scale=sqrt_rank that are"):
                refused.save_pretrained(tmp_path / "refused", rslora=True, merge=merge)
    if case == "llama_tied":  # matrices are merged in our arrays, which are written as those without an adapter
        model.save_pretrained(tmp_path / "merged", merge=True)
        whole = shmap_tp.from_pretrained(tmp_path / "merged", context=32)
        assert_close(whole.parameters, merged(by_path(model.parameters), 16 / RANK**0.5), 2e-6)
        assert_close(whole.logits(IDS), model.logits(IDS), 2e-5)


@pytest.mark.parametrize("case", FUSED)
def test_factors_that_q_k_and_v_share_are_those_of_one_fused_matrix_and_others_are_its_blocks(tmp_path, case):
    base = models.write_directory(tmp_path / "base", case)
    for shared, rank in [(True, RANK), (False, 3 * RANK)]:
        model, out = adapted(base, case, shared=shared), tmp_path / str(shared)
        model.save_pretrained(out)
        config = json.loads((out / "adapter_config.json").read_text())
        assert config["rank_pattern"] == ({} if shared else {FUSED[case]: rank})
        assert config["alpha_pattern"] == ({} if shared else {FUSED[case]: 3 * 16})
        named = {name: w for name, w in models.read_tensors(out).items() if FUSED[case] in name}
        assert {w.shape[0 if ".lora_A." in name else 1] for name, w in named.items()} == {rank}
        assert_same_bits(read(base, out, case, dp=2, mp=4).parameters, model.parameters)
    name = next(name for name in named if ".lora_B." in name)
    models.write_tensors(out / "adapter_model.safetensors", models.read_tensors(out) | {name: named[name] + 1})
    with pytest.raises(UserError, match=r"is neither shared by its 3 parts nor block-diagonal"):
        read(base, out, case)


def test_factors_are_added_to_the_products_of_a_base_in_int8(tmp_path):
    base = models.write_directory(tmp_path / "base", "llama_tied")
    adapted(base, "llama_tied").save_pretrained(tmp_path / "out")
    found = read(base, tmp_path / "out", "llama_tied", dp=1, mp=2, dtype="int8")
    factors, frozen = split_factors(found.parameters)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(factors)} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(frozen)} == {"float32", "int8"}
    assert_close(found.logits(IDS), models.dequantized(found).logits(IDS), 2e-5)


def test_an_adapter_of_some_matrices_has_these_alone_and_beside_it_the_files_of_the_tokenizer(tmp_path):
    base = models.write_directory(tmp_path / "base", "llama")
    for name in ("tokenizer_config.json", "generation_config.json"):
        (base / name).write_text('{"eos_token_id": 2}')
    model = adapted(base, "llama", "model.adapter.matrices=[query,mlp]")
    model.save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert_same_bits(read(base, tmp_path / "out", "llama").parameters, model.parameters)
    assert {file.name for file in (tmp_path / "out").iterdir()} == FILES | {"tokenizer_config.json"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base and an adapter of it."""
    root = tmp_path_factory.mktemp("saved")
    adapted(models.write_directory(root / "base", "llama"), "llama").save_pretrained(root / "out")
    return root


@pytest.mark.parametrize(("changed", "message"), [
    ({"use_dora": True}, "use_dora=true is not supported"),
    ({"bias": "all"}, "bias=all is not supported"),
    ({"lora_bias": True}, "lora_bias=true is not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
    ({"layers_to_transform": [0]}, "layers_to_transform="),
    ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa is not supported"),
    ({"rank_pattern": {"q_proj": 8}}, "rank_pattern=.* all matrices have one rank and alpha here"),
    ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern="),
    ({"peft_type": "IA3"}, "peft_type=IA3 is not supported; supported is LORA"),
    ({"an_option_of_next_year": 1}, "an_option_of_next_year=1 is not supported"),
    ({"lora_alpha": 10**400}, r"lora_alpha=.* must be a number above 0"),
    ({"r": 0}, "r=0 must be an integer above 0"),
    ({"r": 4}, r"lora_A.weight has the shape \[3, 48\], but .*adapter_config.json beside .* asks for \[4, 48\]"),
])  # fmt: skip
def test_options_of_peft_that_are_not_supported_are_refused_by_name(saved, tmp_path, changed, message):
    out = shutil.copytree(saved / "out", tmp_path / "out")
    config = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(config | changed))
    with pytest.raises(UserError, match=message):
        read(saved / "base", out, "llama")


def test_an_adapter_of_another_base_is_refused(saved, tmp_path):
    base = shutil.copytree(saved / "base", tmp_path / "base")
    with (base / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\0")
    with pytest.raises(
        UserError, match=r"out has an adapter of other weights.*\n.*or name a copy of them with --pretrained DIR"
    ):
        read(base, saved / "out", "llama")
    out = shutil.copytree(saved / "out", tmp_path / "out")
    (out / "base.json").unlink()  # as PEFT writes it
    read(base, out, "llama")
    with pytest.raises(UserError, match="has no factor of a matrix of GPTJForCausalLM"):
        read(models.write_directory(tmp_path / "gptj", "gptj"), out, "gptj")
    wide = models.write_directory(tmp_path / "wide", "gemma")
    with pytest.raises(UserError, match=r"q_proj.lora_B.weight has the shape \[48, 3\], but .* asks for \[128, 3\]"):
        read(wide, out, "llama")


def test_damaged_files_are_refused(saved, tmp_path):
    def copy(name: str) -> Path:
        return shutil.copytree(saved / "out", tmp_path / name)

    written = models.read_tensors(saved / "out")
    without = {name: w for name, w in written.items() if "layers.2.mlp.up_proj.lora_B" not in name}
    models.write_tensors(copy("missing") / "adapter_model.safetensors", without)
    more = {"base_model.model.lm_head.weight": np.zeros((97, 48), np.float32)}
    models.write_tensors(copy("more") / "adapter_model.safetensors", written | more)
    (copy("none") / "adapter_model.safetensors").unlink()
    (copy("config") / "adapter_config.json").unlink()
    (copy("base") / "base.json").write_text("[]")
    (copy("numbers") / "base.json").write_text('{"path": 5, "sha256": 6}')
    name = next(iter(written))
    spoiled = written | {name: np.full_like(written[name], np.nan)}
    models.write_tensors(copy("nan") / "adapter_model.safetensors", spoiled)
    for name, message in {
        "missing": "has no tensor base_model.model.model.layers.2.mlp.up_proj.lora_B.weight",
        "more": "has the tensor base_model.model.lm_head.weight, for which",
        "none": "adapter_model.safetensors does not exist; copy it there",
        "config": "has no adapter_config.json; name a directory as PEFT",
        "base": r"base.json: the content=\[\] must be an object",
        "numbers": "base.json: path=5 must be a text",
        "nan": r"adapter_model.safetensors: .*\.adapter\.a\.weight has values that are not finite",
        "nowhere": "has no adapter_config.json",
    }.items():
        with pytest.raises(UserError, match=message):
            read(saved / "base", tmp_path / name, "llama")
