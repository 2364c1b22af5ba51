"""The models of every family against `transformers`: pip install -e '.[test-pretrained]'."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shmap_tp
from shmap_tp.pretrained.families import find_family
from shmap_tp.pretrained.family import plain
from shmap_tp.pretrained.reading import load_parameters
from shmap_tp.pretrained.source import open_source
from shmap_tp.pretrained.writing import MAX_SHARD_BYTES, Form, save_model
from shmap_tp.training.model_functions import build_model_functions
from shmap_tp.training.step import build_step_functions
from tests.helpers.assertions import assert_same_bits, distances
from tests.helpers.pretrained_models import CASES, in_files, read_tensors, reference, tokens, weight, write_directory

torch = pytest.importorskip("torch", reason="pip install -e '.[test-pretrained]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[test-pretrained]'")
from tests.helpers.transformers_float64 import float64_throughout, model_in_float64  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")

WINDOWED = ("mistral", "gemma2", "gemma3", "olmo3", "gpt_oss")
"""Cases with a window."""
every_case = pytest.mark.parametrize("case", CASES)
TOLERANCE = {"float32": 2e-5, "float64": 1e-10}
GRADIENT_TOLERANCE = 1e-4
MESH = {"dp": 2, "mp": 4, "tensor_parallel": "sequence", "zero": "none"}
FAST = [
    {"dp": 1, "mp": 1, "tensor_parallel": "all_reduce", "zero": "none"},
    {"dp": 2, "mp": 2, "tensor_parallel": "sequence", "zero": "fsdp"},
    {"dp": 1, "mp": 4, "tensor_parallel": "collective_matmul", "zero": "none"},
    {"dp": 8, "mp": 1, "tensor_parallel": "all_reduce", "zero": "fsdp"},
    MESH,
]
MODES = [
    {"dp": dp, "mp": mp, "tensor_parallel": mode, "zero": zero}
    for dp, mp in [(1, 1), (2, 2), (1, 4), (8, 1), (2, 4)]
    for mode in (("all_reduce", "sequence", "collective_matmul") if mp > 1 else ("all_reduce",))
    for zero in (("none", "fsdp") if dp > 1 else ("none",))
]
"""With and without FSDP; where a mode or FSDP makes no difference, one of them."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models of all cases."""
    root = tmp_path_factory.mktemp("pretrained")
    for case in CASES:
        write_directory(root / case, case)
    return root


def theirs(directory: Path) -> Any:
    """The model as transformers reads it, but without a padding token: torch drops the gradient of its embedding."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def difference(actual: Any, expected: Any) -> float:
    """max|actual - expected| / max|expected|."""
    return float(np.max(np.abs(np.asarray(actual) - expected)) / np.max(np.abs(expected)))


@every_case
def test_logits_in_float64_are_those_of_transformers(directories, case):
    with float64_throughout(), torch.no_grad():
        expected = model_in_float64(directories / case, case)(torch.tensor(tokens()[:, :-1])).logits.numpy()
    assert expected.dtype == np.float64
    with jax.enable_x64(True):
        config = _config(directories / case, "mesh.dp=2", "mesh.mp=4", "mesh.tensor_parallel=sequence")
        functions = build_model_functions(config, shmap_tp.make_mesh(config), jnp.float64)
        parameters = load_parameters(open_source(str(directories / case)), config.model, functions.shapes)
        logits = functions.logits(parameters, jnp.asarray(tokens()[:, :-1], jnp.int32))
    found = difference(logits[..., : config.model.vocabulary], expected)
    print(f"{case} float64: {found:.1e}")
    assert found < TOLERANCE["float64"]


def _config(directory: Path, *more: str) -> Any:
    file = Path(__file__).parents[2] / "conf" / "finetune.yaml"
    return shmap_tp.load_config(f"model.from_pretrained={directory}", "train.batch=2", *more, file=str(file))


@cache
def expected_of(directory: Path, case: str) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
    """(logits, loss, gradients by the names of files) of transformers."""
    model = theirs(directory)
    logits = model(torch.tensor(tokens()[:, :-1])).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(tokens()[:, 1:]).flatten())
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients |= in_files(name, parameter.grad.numpy(), case)
    return logits.detach().numpy(), float(loss.detach()), gradients


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=() if mesh in FAST else pytest.mark.slow) for mesh in MODES], ids=str
)
@every_case
def test_logits_and_gradients_are_those_of_transformers_in_every_mode(directories, case, mesh, tmp_path):
    """The logits of all positions, and the gradients of all weights, by the names of files."""
    logits, loss, expected = expected_of(directories / case, case)
    assert logits.max() - logits.min() > 5
    model = shmap_tp.from_pretrained(directories / case, **mesh)
    of_logits = difference(model.logits(tokens()[:, :-1]), logits)
    ours, gradients = model.loss_and_gradients(tokens())
    assert abs(float(ours) - loss) < 1e-5 * loss
    save_model(tmp_path / "gradients", model.config, gradients, model.source, Form("float32"))
    of_gradients = distances(read_tensors(tmp_path / "gradients"), expected)
    print(f"{case} {mesh}: logits {of_logits:.1e}, gradients {max(of_gradients.values()):.1e}")
    assert of_logits < TOLERANCE["float32"]
    assert max(of_gradients.values()) < GRADIENT_TOLERANCE, of_gradients


@pytest.mark.parametrize("case", WINDOWED)
def test_greedy_tokens_are_those_of_transformers_for_several_times_the_window(directories, case):
    """A prompt within the window, and tokens to beyond three of it.  With a mask: transformers would take the tokens
    of the prompt that have the id of padding for padding."""
    prompt, new = tokens()[:1, :90], 220
    assert prompt.shape[1] + new > 3 * reference(case)["config"]["sliding_window"]
    model = theirs(directories / case)
    options = {"do_sample": False, "eos_token_id": None, "attention_mask": torch.ones(prompt.shape, dtype=torch.long)}
    expected = model.generate(torch.tensor(prompt), max_new_tokens=new, **options)
    model = shmap_tp.from_pretrained(directories / case, **MESH)
    found = model.generate([prompt[0].tolist()], max_new_tokens=new, temperature=0.0)
    assert found[0] == expected[0, prompt.shape[1] :].tolist()


@every_case
def test_what_is_written_is_loaded_by_transformers_without_missing_or_unexpected_keys(directories, case, tmp_path):
    """Also in bfloat16, in files of at most 30 kB, with an index.  What transformers writes of that is read again."""
    model = shmap_tp.from_pretrained(directories / case, **MESH)
    for dtype, shard_bytes in (("float32", MAX_SHARD_BYTES), ("bfloat16", 30_000)):
        save_model(tmp_path / dtype, model.config, model.parameters, model.source, Form(dtype, shard_bytes=shard_bytes))
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / dtype, dtype="auto", output_loading_info=True
        )
        assert not any(report.values()), report
        for name, parameter in loaded.named_parameters():
            assert parameter.dtype == getattr(torch, dtype), name
            for of_file, values in in_files(name, parameter.detach().float().numpy(), case).items():
                expected = torch.tensor(weight(of_file, values.shape, case)).to(parameter.dtype)
                assert torch.equal(torch.tensor(values), expected.float()), of_file
    assert len(list((tmp_path / "bfloat16").glob("model-*-of-*.safetensors"))) > 2
    loaded.save_pretrained(tmp_path / "back", max_shard_size="30KB")
    written, back = (shmap_tp.from_pretrained(tmp_path / name).parameters for name in ("bfloat16", "back"))
    assert_same_bits(back, written)


def test_the_tokenizer_and_the_generation_settings_are_those_that_transformers_wrote(directories, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "</s>": 2, "b": 3, "<s>": 1}, unk_token="a")
    directory = shutil.copytree(directories / "llama", tmp_path / "in")
    given = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), **given)
    tokenizer.save_pretrained(directory)
    settings = transformers.GenerationConfig(eos_token_id=[2, 3], temperature=0.5, do_sample=True, top_k=7)
    settings.save_pretrained(directory)
    shmap_tp.from_pretrained(directory, dp=2, mp=2).save_pretrained(tmp_path / "out")
    written = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert written.get_vocab() == tokenizer.get_vocab() and written.chat_template == "{{ messages }}"
    assert (written.bos_token_id, written.eos_token_id) == (1, 2)
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").to_dict() == settings.to_dict()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == [2, 3] and model.generation_config.top_k == 7


def steps_of_torch(directory: Path, case: str, rate: float, decay: float, epsilon: float) -> dict[str, np.ndarray]:
    """The tensors of a model after three steps of torch.optim.AdamW, which decays matrices only."""
    with float64_throughout():
        model = model_in_float64(directory, case)
        model.get_input_embeddings().padding_idx = None
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=epsilon)
        for _ in range(3):
            optimizer.zero_grad()
            logits = model(torch.tensor(tokens()[:, :-1])).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(tokens()[:, 1:]).flatten()).backward()
            optimizer.step()
    found = {}
    for name, parameter in model.named_parameters():
        found |= in_files(name, parameter.detach().numpy(), case)
    return found


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "gpt2" else pytest.mark.slow) for c in CASES])
def test_three_steps_of_adamw_are_those_of_torch(directories, case, tmp_path):
    """In float64: a weight whose gradient is rounding noise moves as far as any other."""
    rate, decay, epsilon = 1e-3, 0.1, 1e-8
    expected = steps_of_torch(directories / case, case, rate, decay, epsilon)
    with jax.enable_x64(True):
        constant = [f"optimizer.learning_rate={rate}", f"optimizer.final_learning_rate={rate}"]
        constant += ["optimizer.warmup_steps=0", f"optimizer.weight_decay={decay}", f"optimizer.epsilon={epsilon}"]
        constant += ["optimizer.beta1=0.9", "optimizer.beta2=0.95", "optimizer.clip_norm=1e9"]
        config = _config(directories / case, "mesh.dp=2", "mesh.mp=4", *constant)
        functions = build_step_functions(config, shmap_tp.make_mesh(config), jnp.float64)
        source = open_source(str(directories / case))
        state = functions.init_from(load_parameters(source, config.model, functions.shapes.params))
        batch = jax.device_put(tokens()[None].astype(np.int32), functions.tokens.sharding)
        for _ in range(3):
            state, _ = functions.step(state, batch)
        save_model(tmp_path / "out", config, state.params, source, Form("float64"))
    found = distances(read_tensors(tmp_path / "out"), expected)
    print(f"{case} AdamW: {max(found.values()):.1e}")
    assert max(found.values()) < 1e-9, found


def from_scratch(case: str) -> tuple[str, list[str]]:
    """(the architecture, the keys of a model like the case's, of random sizes)."""
    content, rng = reference(case)["config"], np.random.default_rng(len(case))
    family = find_family(content, "")
    found = {key: plain(value) for key, value in family.options(content, "").items()}
    heads, head_dim = 2 * int(rng.integers(1, 4)), 4 * int(rng.integers(2, 5))
    own_heads = case.startswith("gpt") and case != "gpt_oss"  # with as many key/value heads, and width / heads
    width = heads * (head_dim if own_heads or case == "olmoe" else 4 * int(rng.integers(5, 9)))
    found |= {"width": width, "heads": heads, "kv_heads": heads if own_heads else heads // 2, "head_dim": head_dim}
    found |= {"ffn": 4 * int(rng.integers(3, 9)), "vocabulary": int(rng.integers(60, 100)), "context": 64}
    found |= {"vocabulary_multiple": 1, "attention_chunk": 64, "init_std": 0.1}
    found |= {"rotary_dim": head_dim // 2} if found.get("rotary_dim") else {}
    found |= {"embedding_scale": width**0.5} if "embedding_scale" in found else {}
    return family.architecture, [f"model.{key}={json.dumps(value)}" for key, value in found.items()]


@every_case
def test_a_model_that_was_read_from_nowhere_is_loaded_by_transformers_as_it_is_written(tmp_path, case):
    architecture, keys = from_scratch(case)
    ours = shmap_tp.Model.initialize(shmap_tp.load_config("model=test", *keys, "mesh.dp=1", "mesh.mp=1"))
    ours.save_pretrained(tmp_path / "out")
    loaded = theirs(tmp_path / "out")
    assert type(loaded).__name__ == architecture
    ids = tokens()[:, :64] % ours.config.model.vocabulary
    with torch.no_grad():
        expected = loaded(torch.tensor(ids)).logits.numpy()
    assert difference(ours.logits(ids), expected) < TOLERANCE["float32"]


CONFIGS = {
    "a rounded factor of attention": ("qwen2", "rope_parameters", {"attention_factor": 1.14}),
    "two scales of attention": ("qwen2", "rope_parameters", {"mscale": 0.7, "mscale_all_dim": 1.3}),
    "no original context": ("qwen2", "rope_parameters", {"original_max_position_embeddings": None}),
    "the original context beside the scaling": ("qwen2", None, {"original_max_position_embeddings": 100}),
    "llama3 without an original context": ("llama", "rope_parameters", {"original_max_position_embeddings": None}),
    "NeoX's factor in rope_parameters": ("gpt_neox", "rope_parameters", {"partial_rotary_factor": 0.25}),
    "local layers without a base": ("gemma3", "rope_parameters", {"sliding_attention": None}),
    "a scaling beside nested keys": ("gemma3", None, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
}
"""Case, the section of config.json, and keys of it (None: left out)."""


@pytest.mark.parametrize("name", CONFIGS)
def test_other_forms_of_config_json_are_read_as_transformers_reads_them(directories, name, tmp_path):
    case, section, changed = CONFIGS[name]
    directory = shutil.copytree(directories / case, tmp_path / "m")
    content = json.loads((directory / "config.json").read_text())
    place = content if section is None else content[section]
    place |= changed
    for key in [key for key, value in changed.items() if value is None]:
        del place[key]
    (directory / "config.json").write_text(json.dumps(content))
    with torch.no_grad():
        each = directory, directories / case
        expected, before = (theirs(one)(torch.tensor(tokens()[:, :-1])).logits.numpy() for one in each)
    model = shmap_tp.from_pretrained(directory)
    found = difference(model.logits(tokens()[:, :-1]), expected)
    print(f"{name}: {found:.1e}, changed {difference(before, expected):.1e}")
    assert found < TOLERANCE["float32"] < difference(before, expected)
    model.save_pretrained(tmp_path / "out")
