"""The PyTorch baseline computes our model: the loss and gradients of the dense reference for the same weights."""

import importlib
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shmap_tp.config.schema import ModelConfig
from shmap_tp.errors import UserError
from shmap_tp.layers.attention import Chunked
from shmap_tp.model.transformer import Transformer
from tests.helpers.assertions import assert_close, by_path
from tests.helpers.commands import BENCHMARK_GPU, call
from tests.helpers.model_fixtures import config, random_like, shapes_of
from tests.helpers.reference import objective

torch = pytest.importorskip("torch")
pytorch = importlib.import_module("pytorch_baseline")  # outside importorskip, so that errors in it are not skipped

MODELS = {
    "parallel layernorm gelu learned, tied": ["model.positions=learned", "model.tie_embeddings=true"],
    "sequential rmsnorm swiglu rotary, 2 kv heads of 8": [
        "model.block=sequential", "model.norm=rmsnorm", "model.mlp=swiglu", "model.positions=rotary",
        "model.kv_heads=2",
    ],
}  # fmt: skip


def pytorch_names(p: dict[str, np.ndarray], model: ModelConfig) -> dict[str, np.ndarray]:
    """Our arrays, by dotted path, under the names and in the layouts of pytorch_baseline.py."""
    norms = {"attention_norm": "norm" if model.block == "parallel" else "attention_norm", "mlp_norm": "mlp_norm"}
    found = {"norm.weight": p["norm.scale"], "embedding.weight": p["embedding.weight"]}
    found["head.weight"] = p["embedding.weight" if model.tie_embeddings else "head.weight"]
    if model.positions == "learned":
        found["positions.weight"] = p["positions.weight"]
    for i in range(model.layers):
        of = {path.removeprefix("blocks."): array[i] for path, array in p.items() if path.startswith("blocks.")}
        query, key, value = (of[f"attention.{name}.weight"] for name in ("query", "key", "value"))
        heads = [query, *(w.reshape(w.shape[0], -1).T for w in (key, value))]
        ups = [of[f"mlp.{name}.weight"] for name in ("gate", "up") if f"mlp.{name}.weight" in of]
        layer = {"attention.qkv": np.concatenate(heads), "attention.out": of["attention.out.weight"].T}
        layer |= {"mlp.up": np.concatenate(ups), "mlp.down": of["mlp.down.weight"].T}
        layer |= {name: of[f"{ours}.scale"] for name, ours in norms.items() if f"{ours}.scale" in of}
        found |= {f"layers.{i}.{name}.weight": array for name, array in layer.items()}
    return found


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_those_of_the_reference(name):
    conf = config(*MODELS[name])
    shapes = shapes_of(partial(Transformer, conf.model, Chunked(conf.model.attention_chunk)))
    params = by_path(random_like(shapes, "float64"))
    tokens = np.random.default_rng(1).integers(0, conf.model.vocabulary, (4, conf.model.context + 1))
    with jax.enable_x64(True):
        loss, gradients = jax.value_and_grad(lambda p: objective(p, jnp.asarray(tokens), conf.model, 0.0)[0])(params)
    model = pytorch.Model(conf.model).double()
    weights = {name: torch.tensor(np.ascontiguousarray(w)) for name, w in pytorch_names(params, conf.model).items()}
    model.load_state_dict(weights)
    found = model(torch.tensor(tokens))
    found.backward()
    expected = pytorch_names(by_path(gradients), conf.model)
    assert float(found.detach()) == pytest.approx(float(loss), rel=1e-6)
    assert_close({name: w.grad.numpy() for name, w in model.named_parameters(remove_duplicate=False)}, expected, 1e-6)


def test_alibi_is_rejected():
    with pytest.raises(UserError, match="has no ALiBi"):
        pytorch.Model(config("model.positions=alibi").model)


def test_the_gpu_benchmark_writes_both_rows_with_its_command(tmp_path):
    file = tmp_path / "rows.jsonl"
    flags = ["--dp", "1", "--mp", "1", "--emulate", "--steps", "1", "--torch", "--json", str(file)]
    done = call(*BENCHMARK_GPU, *flags, "model.positions=rotary")
    assert done.returncode == 0, done.stderr
    assert "explicit : pytorch  time " in done.stdout
    ours, theirs = map(json.loads, file.read_text().splitlines())
    assert (ours["program"], theirs["program"]) == ("explicit", "pytorch")
    assert (
        theirs["command"] == ours["command"] == " ".join(["python", *BENCHMARK_GPU, *flags, "model.positions=rotary"])
    )
    assert theirs["tokens_per_step"] == ours["tokens_per_step"] and theirs["step_seconds"] > 0


def test_an_error_of_the_pytorch_baseline_ends_the_benchmark():
    done = call(*BENCHMARK_GPU, "--dp", "1", "--mp", "1", "--emulate", "--torch")  # model test has ALiBi
    assert done.returncode == 2 and "has no ALiBi" in done.stderr
    assert (
        done.stderr.splitlines()[-1] == "error: the PyTorch step failed, see the error above; fix it, or omit --torch"
    )
