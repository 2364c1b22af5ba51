"""The dense reference: the same mathematics on one device, as in the papers, without importing shmap_tp.

B batch, T time, D model width, F hidden width, H query heads, N key/value heads, K head dim, V vocabulary.

A model is a dict `p` from dotted path to array; `inside(p, "blocks")` selects the arrays below a name.  Everything is
written for clarity and float64: full [T, T] scores, one head at a time, one layer at a time.
"""

import math

import jax
import jax.numpy as jnp


def inside(p: dict, name: str) -> dict:
    return {path.removeprefix(name + "."): array for path, array in p.items() if path.startswith(name + ".")}


def layernorm(p: dict, x):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * p["scale"][None, None]


def rmsnorm(p: dict, x):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"][None, None]


def gelu_mlp(p: dict, x):
    up = x @ p["up.weight"].T
    return (0.5 * up * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))) @ p["down.weight"]


def swiglu_mlp(p: dict, x):
    gate = x @ p["gate.weight"].T
    return (gate / (1 + jnp.exp(-gate)) * (x @ p["up.weight"].T)) @ p["down.weight"]


def alibi_slopes(heads: int) -> list[float]:
    """Press et al.: a geometric sequence from 2^(-8/H).  If H is not a power of two: the slopes of the next lower power
    of two, then every second slope of twice that number."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * h / heads) for h in range(1, heads + 1)]
    below = 2 ** int(math.log2(heads))
    return alibi_slopes(below) + alibi_slopes(2 * below)[::2][: heads - below]


def rotate(x_BTHK, base: float = 10_000.0):
    """Components k and k + K/2 form one complex number, which is rotated by position * base^(-2k/K)."""
    time, size = x_BTHK.shape[1], x_BTHK.shape[3]
    frequency = base ** (-2.0 * jnp.arange(size // 2) / size)
    angle = jnp.arange(time)[:, None] * frequency[None, :]
    z = (x_BTHK[..., : size // 2] + 1j * x_BTHK[..., size // 2 :]) * jnp.exp(1j * angle)[None, :, None, :]
    return jnp.concatenate([z.real, z.imag], axis=-1)


def one_head(q_BTK, k_BTK, v_BTK, slope):
    """softmax over s <= t of (q k' / sqrt(K) + slope (s - t)), times v."""
    time, size = q_BTK.shape[1:]
    t, s = jnp.arange(time)[:, None], jnp.arange(time)[None, :]
    scores = jnp.einsum("btk,bsk->bts", q_BTK, k_BTK) / math.sqrt(size) + (slope * (s - t))[None]
    weights = jnp.where((s <= t)[None], jnp.exp(scores - scores.max(-1, keepdims=True)), 0)
    return jnp.einsum("bts,bsk->btk", weights / weights.sum(-1, keepdims=True), v_BTK)


def attention(p: dict, x, positions: str):
    k_BTNK = jnp.einsum("btd,dnk->btnk", x, p["key.weight"])
    v_BTNK = jnp.einsum("btd,dnk->btnk", x, p["value.weight"])
    q_BTHK = (x @ p["query.weight"].T).reshape(*x.shape[:2], -1, k_BTNK.shape[3])
    if positions == "rotary":
        q_BTHK, k_BTNK = rotate(q_BTHK), rotate(k_BTNK)
    heads, share = q_BTHK.shape[2], q_BTHK.shape[2] // k_BTNK.shape[2]
    k_BTHK, v_BTHK = jnp.repeat(k_BTNK, share, axis=2), jnp.repeat(v_BTNK, share, axis=2)
    slopes_H = jnp.array(alibi_slopes(heads) if positions == "alibi" else [0.0] * heads)
    mixed_BTHK = jax.vmap(one_head, in_axes=(2, 2, 2, 0), out_axes=2)(q_BTHK, k_BTHK, v_BTHK, slopes_H)
    return mixed_BTHK.reshape(*x.shape[:2], -1) @ p["out.weight"]


NORMS = {"layernorm": layernorm, "rmsnorm": rmsnorm}
MLPS = {"gelu": gelu_mlp, "swiglu": swiglu_mlp}


def block(p: dict, x, config):
    norm, mlp = NORMS[config.norm], MLPS[config.mlp]
    if config.block == "parallel":
        h = norm(inside(p, "norm"), x)
        return x + attention(inside(p, "attention"), h, config.positions) + mlp(inside(p, "mlp"), h)
    x = x + attention(inside(p, "attention"), norm(inside(p, "attention_norm"), x), config.positions)
    return x + mlp(inside(p, "mlp"), norm(inside(p, "mlp_norm"), x))


def embedding(p: dict, ids_BT):
    """Rows of the table; zeros for ids below zero, which mark ignored positions."""
    return jnp.where((ids_BT >= 0)[..., None], p["weight"][jnp.maximum(ids_BT, 0)], 0)


def transformer(p: dict, ids_BT, config):
    """Logits of all rows of the table, including padding."""
    x = embedding(inside(p, "embedding"), ids_BT)
    if config.positions == "learned":
        x = x + p["positions.weight"][None, : x.shape[1]]
    for layer in range(config.layers):
        x = block({path: array[layer] for path, array in inside(p, "blocks").items()}, x, config)
    head = p["embedding.weight" if config.tie_embeddings else "head.weight"]
    return NORMS[config.norm](inside(p, "norm"), x) @ head.T


def cross_entropy(logits_BTV, targets_BT, vocabulary: int):
    """(-log p(target), log z), both 0 where the target is below zero; columns from `vocabulary` on are ignored."""
    logits = logits_BTV[..., :vocabulary]
    max_logit = logits.max(-1)
    logz = max_logit + jnp.log(jnp.exp(logits - max_logit[..., None]).sum(-1))
    target_logit = (logits * (targets_BT[..., None] == jnp.arange(vocabulary)[None, None])).sum(-1)
    return jnp.where(targets_BT >= 0, logz - target_logit, 0), jnp.where(targets_BT >= 0, logz, 0)


def objective(p: dict, tokens_BT, config, z_loss: float):
    """(the minimised objective, the cross entropy): means over the counted targets."""
    logits = transformer(p, tokens_BT[:, :-1], config)
    nll, logz = cross_entropy(logits, tokens_BT[:, 1:], config.vocabulary)
    counted = (tokens_BT[:, 1:] >= 0).sum()
    return nll.sum() / counted + z_loss * (logz**2).sum() / counted, nll.sum() / counted


def adamw(p: dict, gradients: dict, moments: dict, step: int, rate: float, config):
    """(parameters, moments, norm of the unclipped gradients) after step number `step` >= 1; gradients are clipped."""
    norm = math.sqrt(sum((g**2).sum() for g in gradients.values()))
    new, new_moments = {}, {}
    for path, g in gradients.items():
        g = g * min(1, config.clip_norm / norm)
        m = config.beta1 * moments[path][0] + (1 - config.beta1) * g
        v = config.beta2 * moments[path][1] + (1 - config.beta2) * g**2
        unbiased_m, unbiased_v = m / (1 - config.beta1**step), v / (1 - config.beta2**step)
        decay = 0 if path.endswith("scale") else config.weight_decay
        new[path] = p[path] - rate * (unbiased_m / (unbiased_v**0.5 + config.epsilon) + decay * p[path])
        new_moments[path] = (m, v)
    return new, new_moments, norm
