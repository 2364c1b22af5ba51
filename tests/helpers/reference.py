"""The dense reference: the same mathematics on one device, as in the papers, without importing shmap_tp.

B batch, T time, D model width, F hidden width, H query heads, N key/value heads, K head dim, V vocabulary.

A model is a dict `p` from dotted path to array; `inside(p, "blocks")` selects the arrays below a name.  Everything is
written for clarity and float64: full [T, T] scores, one head at a time, one layer at a time.
"""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp


def inside(p: dict, name: str) -> dict:
    return {path.removeprefix(name + "."): array for path, array in p.items() if path.startswith(name + ".")}


def bias(p: dict, name: str = "bias"):
    """The bias of that name as [1 1 F], or 0 where there is none."""
    return p[name].reshape(1, 1, -1) if name in p else 0


def layernorm(p: dict, x, epsilon: float | None = None):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + (epsilon or 1e-5)) * p["scale"][None, None] + bias(p)


def rmsnorm(p: dict, x, epsilon: float | None = None):
    root = jnp.sqrt((x**2).mean(-1, keepdims=True) + (epsilon or 1e-6))
    return x / root * p["scale"].reshape((1,) * (x.ndim - 1) + (-1,))


def rmsnorm_unit_offset(p: dict, x, epsilon: float | None = None):
    return rmsnorm({"scale": 1 + p["scale"]}, x, epsilon)


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x):
    return x * (1 + jax.scipy.special.erf(x / math.sqrt(2))) / 2


def silu(x):
    return x / (1 + jnp.exp(-x))


def plain_mlp(p: dict, x, activation):
    up = x @ p["up.weight"].T + bias(p, "up.bias")
    return activation(up) @ p["down.weight"] + bias(p, "down.bias")


def gated_mlp(p: dict, x, activation):
    """`activation` is that of the gate; None: as in gpt-oss."""
    gate, up = (x @ p[f"{name}.weight"].T + bias(p, f"{name}.bias") for name in ("gate", "up"))
    if activation is None:
        gate, up = jnp.where(gate > 7, 7, gate), jnp.where(up > 7, 7, jnp.where(up < -7, -7, up))
        hidden = (up + 1) * gate / (1 + jnp.exp(-1.702 * gate))
    else:
        hidden = activation(gate) * up
    return hidden @ p["down.weight"] + bias(p, "down.bias")


def gelu_mlp(p: dict, x):
    return plain_mlp(p, x, gelu)


def swiglu_mlp(p: dict, x):
    return gated_mlp(p, x, silu)


def experts(p: dict, x, config):
    """(the output, the auxiliary loss summed over tokens): one token and one expert at a time, without sorting."""
    activation = {"swiglu": silu, "geglu": gelu, "clamped_swiglu": None}[config.mlp]
    logits = x @ p["router.weight"] + bias(p, "router.bias")
    exponentials = jnp.exp(logits)
    if config.router_scores == "sigmoid":
        scores = exponentials / (1 + exponentials)
    else:
        scores = exponentials / exponentials.sum(-1, keepdims=True)
    # how many experts come before each: those with higher scores, and of equal ones those with lower numbers
    number = jnp.arange(config.experts)
    biased = scores + bias(p, "router.choice_bias")
    mine, other = biased[..., :, None], biased[..., None, :]
    before = (other > mine) | ((other == mine) & (number[None, :] < number[:, None])[None, None])
    chosen = before.sum(-1) < config.experts_per_token
    weights = jnp.where(chosen, scores, 0)
    if config.router_normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    y = 0 * x
    for e in range(config.experts):
        one = {f"{name}.weight": p[f"{name}.weight"][e].T for name in ("gate", "up")}
        one["down.weight"] = p["down.weight"][e]
        one |= {f"{name}.bias": p[f"{name}.bias"][e] for name in ("gate", "up", "down") if f"{name}.bias" in p}
        y = y + weights[..., e, None] * gated_mlp(one, x, activation)
    if config.shared_expert_ffn:
        y = y + gated_mlp(inside(p, "shared"), x, activation)
    share = scores / scores.sum(-1, keepdims=True)
    frequency = chosen.astype(x.dtype).mean(1) * config.experts / config.experts_per_token  # of each sequence
    balance = x.shape[1] * (frequency * share.mean(1)).sum()
    z = (jnp.log(exponentials.sum(-1)) ** 2).sum()
    return y, config.router_balance_loss * balance + config.router_z_loss * z


def alibi_slopes(heads: int) -> list[float]:
    """Press et al.: a geometric sequence from 2^(-8/H).  If H is not a power of two: the slopes of the next lower power
    of two, then every second slope of twice that number."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * h / heads) for h in range(1, heads + 1)]
    below = 2 ** int(math.log2(heads))
    return alibi_slopes(below) + alibi_slopes(2 * below)[::2][: heads - below]


def llama3_frequency(frequency: float, config) -> float:
    """As in the code of Llama 3.1: by the wavelength, the number of positions of one turn."""
    wavelength, original = 2 * math.pi / frequency, config.rotary_original_context
    low, high = config.rotary_low_frequency_factor, config.rotary_high_frequency_factor
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / config.rotary_scaling_factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / config.rotary_scaling_factor + smooth * frequency


def rotate(x_BTHK, config=None):
    """The first R components, taken in pairs as complex numbers, number k rotated by position * base^(-2k/R).

    By default all of them, components k and k + R/2 forming a pair.
    """
    time, size = x_BTHK.shape[1], (config and config.rotary_dim) or x_BTHK.shape[3]
    base = config.rotary_base if config else 10_000.0
    frequencies = [base ** (-2.0 * k / size) for k in range(size // 2)]
    if config and config.rotary_scaling == "llama3":
        frequencies = [llama3_frequency(frequency, config) for frequency in frequencies]
    elif config and config.rotary_scaling == "linear":
        frequencies = [frequency / config.rotary_scaling_factor for frequency in frequencies]
    turn = jnp.exp(1j * jnp.arange(time)[:, None] * jnp.array(frequencies)[None, :])[None, :, None, :]
    x, rest = x_BTHK[..., :size], x_BTHK[..., size:]
    if config and config.rotary_pairing == "neighbouring":
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        y = jnp.stack([z.real, z.imag], axis=-1).reshape(x.shape)
    else:
        z = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * turn
        y = jnp.concatenate([z.real, z.imag], axis=-1)
    return jnp.concatenate([y, rest], axis=-1)


def softcapped(x, cap):
    return x if cap is None else cap * jnp.tanh(x / cap)


def one_head(q_BTK, k_BTK, v_BTK, slope, sink, window, softcap=None, size=None):
    """softmax over t - window < s <= t of (q k' / sqrt(size) + slope (s - t)), times v; `size` is K by default.  A
    sink is the score of one key more, whose value is 0; -inf is none."""
    time, size = q_BTK.shape[1], size or q_BTK.shape[2]
    t, s = jnp.arange(time)[:, None], jnp.arange(time)[None, :]
    scores = softcapped(jnp.einsum("btk,bsk->bts", q_BTK, k_BTK) / math.sqrt(size), softcap)
    scores = scores + (slope * (s - t))[None]
    largest = jnp.maximum(scores.max(-1, keepdims=True), sink)
    weights = jnp.where(((s <= t) & (s > t - window))[None], jnp.exp(scores - largest), 0)
    total = weights.sum(-1, keepdims=True) + jnp.exp(sink - largest)
    return jnp.einsum("bts,bsk->btk", weights / total, v_BTK)


def attention(p: dict, x, positions: str, config=None, layer: int = 0):
    """`config` has the options of the heads; without it there are none."""
    k_BTNK = jnp.einsum("btd,dnk->btnk", x, p["key.weight"])
    v_BTNK = jnp.einsum("btd,dnk->btnk", x, p["value.weight"])
    q_BTHK = (x @ p["query.weight"].T).reshape(*x.shape[:2], -1, k_BTNK.shape[3])
    q_BTHK, k_BTNK, v_BTNK = (
        y + (p[f"{name}.bias"].reshape(1, 1, *y.shape[2:]) if f"{name}.bias" in p else 0)
        for name, y in (("query", q_BTHK), ("key", k_BTNK), ("value", v_BTNK))
    )
    if config and config.qk_norm:
        norm = rmsnorm_unit_offset if config.norm == "rmsnorm_unit_offset" else rmsnorm
        joint = (*x.shape[:2], -1)
        q_BTHK, k_BTNK = (
            norm(
                inside(p, name), y.reshape(joint if config.qk_norm_across_heads else y.shape), config.norm_epsilon
            ).reshape(y.shape)
            for name, y in (("query_norm", q_BTHK), ("key_norm", k_BTNK))
        )
    is_local = config and config.window and (not config.layer_pattern or kind_of(config, layer) == "local")
    if positions == "rotary" and not (config and config.layer_pattern and kind_of(config, layer) == "nope"):
        if is_local and config.rotary_local_base:
            unscaled = type(config.rotary_scaling)("none")
            config = replace(config, rotary_base=config.rotary_local_base, rotary_scaling=unscaled)
        q_BTHK, k_BTNK = rotate(q_BTHK, config), rotate(k_BTNK, config)
    heads, share = q_BTHK.shape[2], q_BTHK.shape[2] // k_BTNK.shape[2]
    k_BTHK, v_BTHK = jnp.repeat(k_BTNK, share, axis=2), jnp.repeat(v_BTNK, share, axis=2)
    slopes_H = jnp.array(alibi_slopes(heads) if positions == "alibi" else [0.0] * heads)
    sinks_H = p["sinks"] if "sinks" in p else jnp.full(heads, -jnp.inf)
    options = {"window": config.window if is_local else x.shape[1]}
    if config:
        options |= {"softcap": config.attention_softcap, "size": config.attention_scale_dim}
    mixed_BTHK = jax.vmap(partial(one_head, **options), in_axes=(2, 2, 2, 0, 0), out_axes=2)(
        q_BTHK, k_BTHK, v_BTHK, slopes_H, sinks_H
    )
    return mixed_BTHK.reshape(*x.shape[:2], -1) @ p["out.weight"] + bias(p, "out.bias")


def kind_of(config, layer: int) -> str:
    return config.layer_pattern[layer % len(config.layer_pattern)]


NORMS = {"layernorm": layernorm, "rmsnorm": rmsnorm, "rmsnorm_unit_offset": rmsnorm_unit_offset}
MLPS = {
    "gelu": gelu_mlp,
    "gelu_erf": lambda p, x: plain_mlp(p, x, gelu_erf),
    "swiglu": swiglu_mlp,
    "geglu": lambda p, x: gated_mlp(p, x, gelu),
    "clamped_swiglu": lambda p, x: gated_mlp(p, x, None),
}


def block(p: dict, x, config, layer: int = 0):
    return block_with_loss(p, x, config, layer)[0]


def block_with_loss(p: dict, x, config, layer: int = 0):
    """(the output, the auxiliary loss summed over tokens)."""
    mlp = MLPS[config.mlp]

    def norm(name: str, x):
        return NORMS[config.norm](inside(p, name), x, config.norm_epsilon)

    def attend(h):
        return attention(inside(p, "attention"), h, config.positions, config, layer)

    if config.block == "sequential":
        before, normed = (
            norm if config.norm_placement in (placement, "both") else lambda name, y: y
            for placement in ("before", "after")
        )
        x = x + normed("attention_output_norm", attend(before("attention_norm", x)))
        h = before("mlp_norm", x)
        y, loss = experts(inside(p, "mlp"), h, config) if config.experts else (mlp(inside(p, "mlp"), h), 0.0)
        return x + normed("mlp_output_norm", y), loss
    names = ("norm", "norm") if config.block == "parallel" else ("attention_norm", "mlp_norm")
    return x + attend(norm(names[0], x)) + mlp(inside(p, "mlp"), norm(names[1], x)), 0.0


def embedding(p: dict, ids_BT):
    """Rows of the table; -1 - id, which does not count as a target, is the same input as id."""
    return p["weight"][jnp.where(ids_BT < 0, ~ids_BT, ids_BT)]


def transformer(p: dict, ids_BT, config):
    """Logits of all rows of the table, including padding."""
    return with_auxiliary_loss(p, ids_BT, config)[0]


def with_auxiliary_loss(p: dict, ids_BT, config):
    """(logits, the auxiliary losses of all blocks, summed over tokens)."""
    total = 0.0
    x = embedding(inside(p, "embedding"), ids_BT) * config.embedding_scale
    if config.positions == "learned":
        x = x + p["positions.weight"][None, : x.shape[1]]
    for layer in range(config.layers):
        x, loss = block_with_loss({path: array[layer] for path, array in inside(p, "blocks").items()}, x, config, layer)
        total = total + loss
    head = p["embedding.weight" if config.tie_embeddings else "head.weight"]
    logits = NORMS[config.norm](inside(p, "norm"), x, config.norm_epsilon) @ head.T + bias(p, "head.bias")
    return softcapped(logits, config.logit_softcap), total


def cross_entropy(logits_BTV, targets_BT, vocabulary: int):
    """(-log p(target), log z), both 0 where the target is below zero; columns from `vocabulary` on are ignored."""
    logits = logits_BTV[..., :vocabulary]
    max_logit = logits.max(-1)
    logz = max_logit + jnp.log(jnp.exp(logits - max_logit[..., None]).sum(-1))
    target_logit = (logits * (targets_BT[..., None] == jnp.arange(vocabulary)[None, None])).sum(-1)
    return jnp.where(targets_BT >= 0, logz - target_logit, 0), jnp.where(targets_BT >= 0, logz, 0)


def objective(p: dict, tokens_BT, config, z_loss: float):
    """(the minimised objective, the cross entropy): means over the counted targets."""
    logits, auxiliary = with_auxiliary_loss(p, tokens_BT[:, :-1], config)
    nll, logz = cross_entropy(logits, tokens_BT[:, 1:], config.vocabulary)
    counted = (tokens_BT[:, 1:] >= 0).sum()
    cross = nll.sum() / counted
    return cross + z_loss * (logz**2).sum() / counted + auxiliary / tokens_BT[:, 1:].size, cross


def adamw(p: dict, gradients: dict, moments: dict, step: int, rate: float, config):
    """(parameters, moments, norm of the unclipped gradients) after step number `step` >= 1; gradients are clipped."""
    norm = math.sqrt(sum((g**2).sum() for g in gradients.values()))
    new, new_moments = {}, {}
    for path, g in gradients.items():
        g = g * min(1, config.clip_norm / norm)
        m = config.beta1 * moments[path][0] + (1 - config.beta1) * g
        v = config.beta2 * moments[path][1] + (1 - config.beta2) * g**2
        unbiased_m, unbiased_v = m / (1 - config.beta1**step), v / (1 - config.beta2**step)
        decay = 0 if path.endswith(("scale", "bias")) else config.weight_decay
        new[path] = p[path] - rate * (unbiased_m / (unbiased_v**0.5 + config.epsilon) + decay * p[path])
        new_moments[path] = (m, v)
    return new, new_moments, norm
