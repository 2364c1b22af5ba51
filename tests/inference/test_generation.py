"""Generation with a key/value cache gives what the full forward pass gives, on every mesh and in every batch."""

import inspect
from collections import Counter
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shmap_tp
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import DEVICES
from shmap_tp.inference.cache import EmptyCache, KeyValueCache, cache_bytes, layer_slots
from shmap_tp.inference.generator import Options, check_prompts, generate, stream
from shmap_tp.inference.programs import GenerationPrograms, PrefillShape, unstacked, with_blocks
from shmap_tp.layers.embedding import score
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.parallel.tensor_parallel import AllReduce, prompt_tensor_parallel
from shmap_tp.plan.ledger import Operation, communication_in_jaxpr
from shmap_tp.training.model_functions import build_model_functions
from tests.helpers.model_fixtures import MODEL, random_like

PROMPTS = [[3], [7, 1, 40, 22, 9], [5, 5, 11], [48, 2], [1, 2, 3, 4, 5, 6, 7]]
"""Prompts of different lengths, whose number is not a multiple of any dp."""
SAMPLED = {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 5, "max_new_tokens": 9}
ROTARY = ("model.positions=rotary", "model.kv_heads=2")
LLAMA = ("model.positions=rotary", "model.block=sequential", "model.norm=rmsnorm", "model.mlp=swiglu")
LAYERS_APART = (
    *LLAMA,
    *("model.layers=4", "model.window=4", "model.layer_pattern=[local,global,nope]", "model.attention_sinks=true"),
    *("model.rotary_local_base=100", "model.attention_softcap=2", "model.logit_softcap=3", "model.qk_norm=true"),
    *("model.norm_placement=both", "model.attention_scale_dim=3"),
)


def configuration(dp: int, mp: int, *more: str) -> shmap_tp.config.schema.Config:
    """50 ids in 64 rows."""
    settings = [f"model.{setting}" for setting in MODEL.split()]
    given = ["model=test", *settings, "model.context=24", "train.batch=8", "train.microbatches=1"]
    return shmap_tp.load_config(*given, f"mesh.dp={dp}", f"mesh.mp={mp}", "train.precision=float32", *more)


@cache
def model(dp: int, mp: int, *more: str) -> shmap_tp.Model:
    """Weights so large that the logits spread widely, also those of padding.  Its programs serve several tests."""
    config = configuration(dp, mp, *more)
    mesh = shmap_tp.make_mesh(config)
    functions = build_model_functions(config, mesh, jnp.float32)
    values = random_like(functions.shapes, "float32", spread=0.5)
    parameters = jax.tree.map(lambda x, at: jax.device_put(x, at.sharding), values, functions.shapes)
    return shmap_tp.Model(config, mesh, parameters, functions)


def greedy_by_full_forward(model: shmap_tp.Model) -> list[list[int]]:
    """The most likely tokens after each of PROMPTS to the end of the context, none of them by a hair.  The forward pass
    is that of the whole context: tokens after a position do not change its logits (test_model)."""
    ids = np.zeros((len(PROMPTS), 25), np.int32)
    rows, ends = np.arange(len(PROMPTS)), np.array([len(prompt) for prompt in PROMPTS])
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)] = prompt
    for filled in range(1, 24):
        last = np.asarray(model.logits(ids[:, :24]))[:, filled - 1]
        ordered = np.sort(last, axis=-1)
        assert (ordered[:, -1] - ordered[:, -2]).min() > 1e-4
        ids[rows, filled] = np.where(filled < ends, ids[rows, filled], last.argmax(-1))
    return [ids[row, end:24].tolist() for row, end in enumerate(ends)]


def test_greedy_tokens_on_a_mesh_are_those_of_the_full_forward_pass_on_one_device_to_the_end_of_the_context():
    """dp does not divide the prompts, nor mp the key/value heads.  An answer ends before its stop token."""
    expected, here = greedy_by_full_forward(model(1, 1, *ROTARY)), model(2, 4, *ROTARY)
    assert here.generate(PROMPTS, max_new_tokens=100) == expected
    stop = expected[1][6]
    cut = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in expected]
    assert here.generate(PROMPTS, max_new_tokens=100, stop_tokens=(stop,), decode_tokens=4) == cut


CACHED = {
    "ALiBi, parallel": ["model.positions=alibi", "model.block=parallel"],
    "rotary, sequential, two key/value heads": [
        *LLAMA,
        *("model.kv_heads=2", "model.qk_norm=true", "model.rotary_dim=2", "model.rotary_pairing=neighbouring"),
    ],
    "learned, parallel with two norms, tied, FSDP": [
        *("model.positions=learned", "model.tie_embeddings=true", "model.block=parallel_two_norms"),
        *("model.qkv_bias=true", "mesh.zero=fsdp"),
    ],
    "local and global": LAYERS_APART,
    "local, nope and local": [*LAYERS_APART, "model.layers=3", "model.layer_pattern=[local,nope]"],
    "local, experts, FSDP": [
        *(*LLAMA, "model.window=5"),
        *("model.experts=8", "model.experts_per_token=3", "model.ffn=12", "model.shared_expert_ffn=8"),
        *("model.router_balance_loss=0.1", "mesh.zero=fsdp"),
    ],
}


@pytest.mark.parametrize(
    ("variant", "shape", "unrolled"),
    [
        ("ALiBi, parallel", (1, 8), False),
        ("rotary, sequential, two key/value heads", (1, 8), True),
        ("learned, parallel with two norms, tied, FSDP", (4, 2), False),
        ("local and global", (2, 4), True),
        ("local, nope and local", (2, 2), False),
        ("local, experts, FSDP", (2, 2), False),
    ],
    ids=str,
)
def test_logits_with_a_cache_equal_those_of_the_full_forward_pass_at_every_position(variant, shape, unrolled):
    """A prompt of 5 tokens read at once behind some slots of padding, then token by token, in a scan over stacked
    layers or with arrays of each layer; with a window in as many slots as it has, which the tokens fill three times.
    """
    here = model(*shape, *CACHED[variant])
    programs, padding = here.generation_programs, 2 if variant.startswith("ALiBi") else 3  # 7 slots are not sharded
    ids = np.random.default_rng(0).integers(0, 50, (8, 14)).astype(np.int32)

    def run(params, ids_BT):
        slots_L = layer_slots(programs.model, 20)
        if not unrolled and len(set(slots_L)) > 1:
            slots_L = (20,) * len(slots_L)
        empty = EmptyCache(jnp.full(len(ids_BT), padding, jnp.int32), slots_L, jnp.float32, unrolled)
        prompt_BT, tp = jnp.pad(ids_BT[:, :5], [(0, 0), (padding, 0)]), prompt_tensor_parallel(5 + padding, shape[1])
        h_BTD, cache = programs._with_cache(params, prompt_BT, empty, tp)
        h_BTD, projection = params.output_projection(h_BTD[:, padding:], programs.execution)
        first_BTV = score(h_BTD.reshape(-1, h_BTD.shape[-1]), projection).reshape(*h_BTD.shape[:2], -1)
        decoding = with_blocks(params, unstacked(params.blocks)) if unrolled else params

        def step(cache, ids_B):
            h_B1D, cache = programs._with_cache(decoding, ids_B[:, None], cache, AllReduce())
            return cache, programs._logits(params, h_B1D)

        _, later_TBV = lax.scan(step, cache, ids_BT[:, 5:].T)
        return jnp.concatenate([first_BTV, later_TBV.swapaxes(0, 1)], axis=1)

    mapped = programs.sharded.mapped(run, (jax.P(DP),), jax.P(DP, None, MP))
    cached, full = jax.jit(mapped)(here.parameters, ids)[..., :50], here.logits(ids)
    assert np.abs(full).max() > 1
    np.testing.assert_allclose(cached, full, atol=1e-5 * float(np.abs(full).max()), rtol=0)


def test_tokens_of_a_copy_with_arrays_of_each_layer_are_the_same_and_it_is_made_once(monkeypatch):
    """As on TPUs, where it is made if the devices have room for it."""
    two_layers = [*LLAMA, "model.window=4", "model.layer_pattern=[local,global]"]
    here, options = model(4, 2, *two_layers, "mesh.zero=fsdp", "mesh.slices=2"), Options(10, decode_tokens=4)
    expected = [tokens[:10] for tokens in greedy_by_full_forward(here)]
    assert generate(here.generation_programs, here.parameters, PROMPTS, options) == expected
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["TPU v5 lite"], memory=1e9))
    programs = GenerationPrograms(here.generation_programs.model, here.generation_programs.sharded)
    copies, unstack = [], programs.unstack
    programs.unstack = lambda blocks: copies.append(unstack(blocks)) or copies[-1]
    assert generate(programs, here.parameters, PROMPTS, options) == expected
    assert len(copies) == 1 and len(copies[0]) == programs.model.layers
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["TPU v5 lite"], memory=1e3))
    small = GenerationPrograms(programs.model, programs.sharded)
    assert small.unrolled and small.for_decoding(here.parameters, KeyValueCache((), (), None, None)) is here.parameters


def test_sampled_tokens_are_a_function_of_seed_request_sample_and_position():
    """On every mesh, in any order; several samples of a prompt differ, and the first is that of a single one."""
    here = model(2, 4, *ROTARY)
    first, several = model(1, 1, *ROTARY).generate(PROMPTS, **SAMPLED), here.generate(PROMPTS, samples=3, **SAMPLED)
    assert several[::3] == first
    assert all(len({tuple(tokens) for tokens in several[row : row + 3]}) == 3 for row in range(0, 15, 3))
    options = Options(samples=3, **SAMPLED)
    turned = list(stream(here.generation_programs, here.parameters, PROMPTS[::-1], options, requests=[4, 3, 2, 1, 0]))
    assert [[token for piece in turned for token in piece[row]] for row in range(12, -1, -3)] == first
    assert here.generate(PROMPTS, samples=3, **SAMPLED | {"seed": 6})[::3] != first


def test_weights_that_are_not_finite_generate_nothing():
    here = model(1, 1, *ROTARY)
    broken = replace(here, parameters=jax.tree.map(lambda x: x * jnp.nan, here.parameters))
    with pytest.raises(UserError, match="a new token has logits that are infinite or NaN"):
        broken.generate(PROMPTS, **SAMPLED)


@pytest.mark.parametrize("block", ["parallel", "sequential"])
def test_a_decode_step_communicates_and_keeps_what_the_docstrings_say(block):
    """B=2 sequences per device, D=24, float32."""
    given = configuration(2, 4, f"model.block={block}", "model.kv_heads=2")
    functions = build_model_functions(given, shmap_tp.make_mesh(given), jnp.float32)
    programs, options = GenerationPrograms(given.model, functions.model), Options(4, temperature=1.0, top_k=3)
    prompts, requests = np.zeros((4, 8), np.int32), np.arange(4, dtype=np.int32)
    prefill = {"filters": options.filters, "shape": PrefillShape(16, 1)}
    given = functions.shapes, options.sampling, prompts, requests
    _, progress = jax.eval_shape(partial(programs.prefill, **prefill), *given)
    local = sum(x.size * x.dtype.itemsize for x in progress.cache.keys) // 8
    assert 2 * local == cache_bytes(programs.model, 2, 4, 4, 16, jnp.float32)
    decode = partial(programs.decode, filters=options.filters, count=5)
    found: Counter[tuple] = Counter()
    for entry in communication_in_jaxpr(jax.make_jaxpr(decode)(functions.shapes, options.sampling, progress).jaxpr):
        found[entry.axis, entry.operation, entry.bytes] += entry.count
    layers, products = 2, 1 if block == "parallel" else 2
    assert found == {
        ("mp", Operation.all_reduce, 2 * 24 * 4): 5 * (1 + layers * products),
        ("mp", Operation.all_gather, 2 * 4): 5 * 2,
        ("mp", Operation.max, 2 * 4): 5,
        ("mp", Operation.all_reduce, 2 * 4): 5 * 65,
        ("dp", Operation.all_gather, 2 * 5 * 4): 1,
    }


def test_scores_are_those_of_the_logits():
    tokens = np.random.default_rng(1).integers(0, 50, (3, 20))
    mask = np.arange(20)[None] >= np.array([[1], [15], [19]])
    logits, here = np.asarray(model(1, 1, *ROTARY).logits(tokens[:, :-1]), np.float64), model(2, 4, *ROTARY)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    each = np.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0]
    likelihood, greedy = here.score(tokens, mask)
    np.testing.assert_allclose(likelihood, (each * mask[:, 1:]).sum(1), rtol=1e-5)
    assert not greedy.any()
    best = np.append(tokens[:, :1], logits.argmax(-1), axis=1)
    best[:, :-1] = tokens[:, :-1]
    _, greedy = here.score(best, np.arange(20)[None] == np.full((3, 1), 19))
    assert greedy.all()


NO_ID = r"prompt 0 has .*, which is not a token id; give integers"
NO_LIST = "prompt 0 must be a list of token ids, not {}; encode text first"
PROMPTS_REFUSED = [
    ([], "there is no prompt"),
    ([[1], []], "prompt 1 is empty"),
    ([[1, 50]], "prompt 0 has token id 50, but model.vocabulary=50"),
    ([[-1]], "token id -1"),
    ([[1] * 24], "prompt 0 has 24 tokens, and no room in model.context=24"),
    *(([prompt], NO_ID) for prompt in ([1.5], [True], np.array([1.0]), np.ma.array([1, 2], mask=[False, True]))),
    *((prompts, NO_LIST.format(shown)) for prompts, shown in ((["text"], "'text'"), ("text", "'t'"), ([1, 2], "1"))),
]


@pytest.mark.parametrize(("prompts", "message"), PROMPTS_REFUSED, ids=str)
def test_prompts_that_are_not_lists_of_ids_of_the_model_are_refused(prompts, message):
    """Outside the tests nothing checks the types of arguments."""
    with pytest.raises(UserError, match=message):
        inspect.unwrap(check_prompts)(prompts, configuration(1, 1).model)


@pytest.mark.parametrize(("name", "rule", "values"), [
    ("stop_tokens", "token ids", ("a", (1.5,), 5)),
    ("max_new_tokens", "an integer", (2.5,)),
    ("temperature", "a number", ("hot",)),
    ("max_new_tokens", r"1 or more and below 2\^31", (0,)),
    ("temperature", r"1e-06 or more and at most .*; 0 \(greedy\)", (-1.0, float("nan"), 1e-40, 1e300)),
    ("top_k", r"0 or more and below 2\^31", (3_000_000_000, 10**30)),
    ("top_p", "above 0 and at most 1", (0.0, 2.0)),
    ("repetition_penalty", "1e-06 or more and at most", (1e39, 1e-300)),
    ("samples", "1 or more and below 65537", (0, 999_999_999)),
])  # fmt: skip
def test_an_option_of_another_type_or_out_of_range_is_refused(name, rule, values):
    for value in values:
        options = Options()
        object.__setattr__(options, name, value)  # past the types, which only tests check
        with pytest.raises(UserError, match=rf"{name}=.* must be {rule}"):
            options.__post_init__()
