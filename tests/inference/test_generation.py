"""Generation with a key/value cache gives what the full forward pass gives, on every mesh and in every batch."""

import inspect
from collections import Counter
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shmap_tp
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import DEVICES
from shmap_tp.inference.cache import EmptyCache, cache_bytes, layer_slots
from shmap_tp.inference.generator import Options, check_prompts, generate, stream
from shmap_tp.inference.programs import GenerationPrograms, PrefillShape, unstacked, with_blocks
from shmap_tp.layers.embedding import score
from shmap_tp.model.transformer import Carried
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.plan.communication.from_jaxpr import communication_in_jaxpr
from shmap_tp.plan.communication.ledger import Operation
from tests.helpers.model_fixtures import MODEL

PROMPTS = [[3], [7, 1, 40, 22, 9], [5, 5, 11], [48, 2], [1, 2, 3, 4, 5, 6, 7]]
"""Of different lengths, and not a multiple of any dp."""
SAMPLED = {"temperature": 1.0, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 5}
VARIANTS = {
    "ALiBi, parallel": ["model.positions=alibi", "model.block=parallel"],
    "rotary, sequential, RMSNorm, SwiGLU": [
        "model.positions=rotary",
        "model.block=sequential",
        "model.norm=rmsnorm",
        "model.mlp=swiglu",
    ],
    "learned, tied": ["model.positions=learned", "model.tie_embeddings=true"],
    "rotary, two key/value heads": ["model.positions=rotary", "model.kv_heads=2"],
    "FSDP": ["mesh.zero=fsdp", "model.positions=rotary"],
}
MESHES = [(1, 1), (2, 2), (1, 4), (8, 1), (1, 8)]


@cache
def model(dp: int, mp: int, *more: str) -> shmap_tp.Model:
    """Weights so large that the logits spread widely; 50 ids in 64 rows.  Its compiled programs serve several tests."""
    settings = [f"model.{setting}" for setting in MODEL.split()]
    given = ["model=test", *settings, "model.context=24", "model.init_std=0.5", "train.batch=8", "train.microbatches=1"]
    return shmap_tp.Model.initialize(
        shmap_tp.load_config(*given, f"mesh.dp={dp}", f"mesh.mp={mp}", "train.precision=float32", *more)
    )


def greedy_by_full_forward(model: shmap_tp.Model, count: int) -> tuple[list[list[int]], float]:
    """(the most likely tokens after each of PROMPTS, the smallest margin between the two most likely).  The forward
    pass is that of the whole context: tokens after a position do not change its logits (test_model)."""
    ids, margin = np.zeros((len(PROMPTS), 24), np.int32), np.inf
    rows, ends = np.arange(len(PROMPTS)), np.array([len(prompt) for prompt in PROMPTS])
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)] = prompt
    for new in range(count):
        last = np.asarray(model.logits(ids))[rows, ends + new - 1]
        ordered = np.sort(last, axis=-1)
        margin = min(margin, (ordered[:, -1] - ordered[:, -2]).min())
        ids[rows, ends + new] = last.argmax(-1)
    return [ids[row, end : end + count].tolist() for row, end in enumerate(ends)], margin


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_are_those_of_the_full_forward_pass_on_every_mesh(variant):
    """One variant on every mesh; the others on one whose mp and dp both exceed 1."""
    expected, margin = greedy_by_full_forward(model(1, 1, *VARIANTS[variant]), 10)
    assert margin > 1e-4
    for shape in MESHES if variant.startswith("rotary, two") else [(2, 4)]:
        assert model(*shape, *VARIANTS[variant]).generate(PROMPTS, max_new_tokens=10) == expected, shape


CACHED = {
    "ALiBi, parallel": VARIANTS["ALiBi, parallel"],
    "rotary, sequential, two key/value heads": [
        *VARIANTS["rotary, sequential, RMSNorm, SwiGLU"],
        "model.kv_heads=2",
        "model.qk_norm=true",
        "model.rotary_dim=2",
        "model.rotary_pairing=neighbouring",
    ],
    "learned, parallel with two norms, tied, FSDP": [
        *VARIANTS["learned, tied"],
        "model.block=parallel_two_norms",
        "model.qkv_bias=true",
        "mesh.zero=fsdp",
    ],
    "local and global": [
        *VARIANTS["rotary, sequential, RMSNorm, SwiGLU"],
        "model.layers=4",
        "model.window=4",
        "model.layer_pattern=[local,global,nope]",
        "model.attention_sinks=true",
        *("model.rotary_local_base=100", "model.attention_softcap=2", "model.logit_softcap=3", "model.qk_norm=true"),
        *("model.norm_placement=both", "model.attention_scale_dim=3"),
    ],
}


CACHED["local"] = [*VARIANTS["rotary, sequential, RMSNorm, SwiGLU"], "model.window=5"]
CACHED["experts"] = [
    *VARIANTS["rotary, sequential, RMSNorm, SwiGLU"],
    *("model.experts=8", "model.experts_per_token=3", "model.ffn=12", "model.shared_expert_ffn=8"),
    *("model.router_balance_loss=0.1", "mesh.zero=fsdp"),
]
ROTARY, LEARNED = "rotary, sequential, two key/value heads", "learned, parallel with two norms, tied, FSDP"


@pytest.mark.parametrize(
    ("variant", "shape", "unrolled"),
    [
        *((ROTARY, shape, shape != (2, 2)) for shape in ((2, 2), (8, 1), (1, 8))),
        ("ALiBi, parallel", (1, 8), False),
        (LEARNED, (2, 2), True),
        (LEARNED, (8, 1), False),
        ("local and global", (2, 4), True),
        ("local and global", (2, 4), False),
        ("local", (2, 2), False),
        ("experts", (2, 4), True),
    ],
    ids=str,
)
def test_logits_with_a_cache_equal_those_of_the_full_forward_pass_at_every_position(variant, shape, unrolled):
    """A prompt of 5 tokens read at once behind 3 slots of padding, then token by token, in a scan over stacked layers
    or with arrays of each layer; with a window in as many slots as it has, which the tokens fill three times."""
    here = model(*shape, *CACHED[variant])
    programs = here.generation_programs
    sharded, execution = programs.sharded, programs.execution
    ids = np.random.default_rng(0).integers(0, 50, (8, 14)).astype(np.int32)

    def run(params, ids_BT):
        slots_L = layer_slots(programs.model, 20)
        if not unrolled and len(set(slots_L)) > 1:
            slots_L = (20,) * len(slots_L)
        cache = EmptyCache(jnp.full(len(ids_BT), 3, jnp.int32), slots_L, jnp.float32, unrolled)
        decoding = with_blocks(params, unstacked(params.blocks)) if unrolled else params
        found = []
        for part in [jnp.pad(ids_BT[:, :5], [(0, 0), (3, 0)]), *jnp.split(ids_BT[:, 5:], 9, axis=1)]:
            weights = decoding if found else params
            h_BTD, extras = weights(part, execution, Carried(cache.positions(part.shape[1]), cache=cache))
            h_BTD, projection = params.output_projection(h_BTD, execution)
            cache = extras.cache
            found += [score(h_BTD[:, time], projection) for time in range(part.shape[1])]
        return jnp.stack(found[3:], axis=1)

    mapped = sharded.mapped(run, (jax.P(DP),), jax.P(DP, None, MP))
    cached, full = jax.jit(mapped)(here.parameters, ids)[..., :50], here.logits(ids)
    assert np.abs(full).max() > 1
    np.testing.assert_allclose(cached, full, atol=1e-5 * float(np.abs(full).max()), rtol=0)


@pytest.mark.parametrize(("shape", "more"), [
    ((2, 4), CACHED["local and global"]), ((4, 2), ["mesh.zero=fsdp", "mesh.slices=2", "model.positions=rotary"]),
])  # fmt: skip
def test_tokens_of_a_copy_with_arrays_of_each_layer_are_the_same_and_it_is_made_once(monkeypatch, shape, more):
    """As on TPUs, where it is made if the devices have room for it."""
    here, options = model(*shape, *more), Options(10, decode_tokens=4)
    expected = here.generate(PROMPTS, max_new_tokens=10)
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["TPU v5 lite"], memory=1e9))
    programs = GenerationPrograms(here.generation_programs.model, here.generation_programs.sharded)
    copies, unstack = [], programs.unstack
    programs.unstack = lambda blocks: copies.append(unstack(blocks)) or copies[-1]
    assert generate(programs, here.parameters, PROMPTS, options) == expected
    assert len(copies) == 1 and len(copies[0]) == programs.model.layers
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["TPU v5 lite"], memory=1e3))
    small = GenerationPrograms(programs.model, programs.sharded)
    small.unstack = lambda _: pytest.fail("there is no room for a copy")
    assert small.unrolled and generate(small, here.parameters, PROMPTS, options) == expected


@pytest.mark.parametrize("options", [SAMPLED, {"temperature": 2.0, "seed": 1}], ids=["all options", "temperature"])
def test_sampled_tokens_are_a_function_of_seed_request_and_position(options):
    first = model(1, 1).generate(PROMPTS, max_new_tokens=9, **options)
    for shape in [(2, 2), (1, 8)]:
        there = model(*shape)
        assert there.generate(PROMPTS, max_new_tokens=9, **options) == first, shape
    one = list(stream(there.generation_programs, there.parameters, [PROMPTS[3]], Options(9, **options), requests=[3]))
    assert [token for [piece] in one for token in piece] == first[3]
    assert there.generate(PROMPTS, max_new_tokens=9, **options | {"seed": 6}) != first


def test_samples_of_one_prompt_differ_and_the_first_is_that_of_a_single_sample():
    here = model(2, 2)
    single = here.generate(PROMPTS, max_new_tokens=8, temperature=1.5)
    several = here.generate(PROMPTS, max_new_tokens=8, temperature=1.5, samples=3)
    assert several[::3] == single
    assert all(len({tuple(tokens) for tokens in several[row : row + 3]}) == 3 for row in range(0, 15, 3))


def test_a_sequence_ends_before_its_stop_token_and_at_the_context():
    here = model(1, 2)
    full = here.generate(PROMPTS, max_new_tokens=100)
    assert [len(prompt) + len(tokens) for prompt, tokens in zip(PROMPTS, full, strict=True)] == [24] * len(PROMPTS)
    stop = full[1][6]
    expected = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in full]
    assert here.generate(PROMPTS, max_new_tokens=100, stop_tokens=(stop,), decode_tokens=4) == expected


@pytest.mark.parametrize("block", ["parallel", "sequential"])
def test_a_decode_step_communicates_and_keeps_what_the_docstrings_say(block):
    """B=2 sequences per device, D=24, float32."""
    here = model(2, 4, f"model.block={block}", "model.kv_heads=2")
    programs, options = here.generation_programs, Options(4, temperature=1.0, top_k=3)
    prompts, requests = np.zeros((4, 8), np.int32), np.arange(4, dtype=np.int32)
    prefill = {"filters": options.filters, "shape": PrefillShape(16, 1)}
    _, progress = jax.eval_shape(
        partial(programs.prefill, **prefill), here.parameters, options.sampling, prompts, requests
    )
    local = sum(x.size * x.dtype.itemsize for x in progress.cache.keys) // 8
    assert 2 * local == cache_bytes(programs.model, 2, 4, 4, 16, jnp.float32)
    decode = partial(programs.decode, filters=options.filters, count=5)
    found: Counter[tuple] = Counter()
    for entry in communication_in_jaxpr(jax.make_jaxpr(decode)(here.parameters, options.sampling, progress).jaxpr):
        found[entry.axis, entry.operation, entry.bytes] += entry.count
    layers, products = 2, 1 if block == "parallel" else 2
    assert found == {
        ("mp", Operation.all_reduce, 2 * 24 * 4): 5 * (1 + layers * products),
        ("mp", Operation.all_gather, 2 * 4): 5 * 2,
        ("mp", Operation.max, 2 * 4): 5,
        ("mp", Operation.all_reduce, 2 * 4): 5 * 65,
        ("dp", Operation.all_gather, 2 * 5 * 4): 1,
    }


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there is no prompt"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 50]], {}, "prompt 0 has token id 50, which is not in 0 to 49"),
        ([[-1]], {}, "token id -1"),
        ([[1] * 24], {}, "prompt 0 has 24 tokens, which leave no room for a new one in model.context=24"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0 must be 0"),
        ([[1]], {"temperature": float("nan")}, "temperature=nan"),
        ([[1]], {"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ([[1]], {"samples": 0}, "samples=0"),
    ],
    ids=str,
)
def test_bad_prompts_and_options_are_refused(prompts, options, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        model(1, 1).generate(prompts, **options)


@pytest.mark.parametrize("prompt", [[1.5], [True], np.array([1.0]), np.ma.array([1, 2], mask=[False, True])], ids=str)
def test_a_prompt_of_other_values_than_integers_is_refused(prompt):
    with pytest.raises(UserError, match=r"prompt 0 has .*, which is not a token id; give integers"):
        inspect.unwrap(check_prompts)([prompt], model(1, 1).config.model)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("stop_tokens", "a", "token ids"),
        ("stop_tokens", (1.5,), "token ids"),
        ("stop_tokens", 5, "token ids"),
        ("max_new_tokens", 2.5, "an integer"),
        ("temperature", "hot", "a number"),
    ],
    ids=str,
)
def test_an_option_of_another_type_is_refused(name, value, rule):
    options = Options()
    object.__setattr__(options, name, value)  # past the types, which only tests check
    with pytest.raises(UserError, match=rf"{name}=.* must be {rule}"):
        options.__post_init__()


@pytest.mark.parametrize(("prompts", "shown"), [(["text"], "'text'"), ("text", "'t'"), ([1, 2], "1")], ids=str)
def test_prompts_that_are_not_lists_of_ids_are_refused(prompts, shown):
    """Outside the tests nothing checks the types of arguments."""
    with pytest.raises(UserError, match=f"prompt 0 must be a list of token ids, not {shown}; encode text first"):
        inspect.unwrap(check_prompts)(prompts, model(1, 1).config.model)


def test_scores_are_those_of_the_logits():
    tokens = np.random.default_rng(1).integers(0, 50, (3, 20))
    mask = np.arange(20)[None] >= np.array([[1], [15], [19]])
    for shape in [(1, 1), (2, 4)]:
        here = model(*shape)
        logits = np.asarray(here.logits(tokens[:, :-1]), np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        each = np.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0]
        likelihood, greedy = here.score(tokens, mask)
        np.testing.assert_allclose(likelihood, (each * mask[:, 1:]).sum(1), rtol=1e-5)
        assert not greedy.any()
    best = np.append(tokens[:, :1], logits.argmax(-1), axis=1)
    best[:, :-1] = tokens[:, :-1]
    _, greedy = here.score(best, np.arange(20)[None] == np.full((3, 1), 19))
    assert greedy.all()
