"""Products in eight bits, for training (`train.matmul_precision`): a weight of a linear layer, and how it multiplies.

B batch, T time, D features in, F features out.  q: eight bits, int8 or float8.  One scale for each row of an activation
and for each output feature of a weight, the largest value of which becomes the largest number of the format:

    step       w[D F]  ~  q_w[D F] * s_w[F]           once, from the float32 weight, before FSDP gathers it
    forward    x[B T D]  ~  q_x * s_x[B T],           y = (q_x @ q_w) * s_x * s_w         accumulated in 32 bits
    backward   dy[B T F] * s_w[F]  ~  q_g * s_g[B T], dx = (q_g @ q_w') * s_g
               dy * s_x[B T]  ~  q * s[F],               dw = (q_x' @ q) * s

dw is given to the float32 weight as if w had not been rounded (straight-through).  The gradient of x sums over F, and
dw over tokens, so the scales of the other operand become part of dy before that is rounded, which is exact.  dw has
scales by feature because Adam divides the gradient of each weight by its own size: next to the largest feature of a
token, the smallest would be 0.  With `train.matmul_rounding=stochastic` both roundings of dy are stochastic, by random
numbers that depend on run.seed, the step, the microbatch, the matrix, its layer and feature, the row and the position.

The scale of a weight is that of all its inputs, also where devices hold some of them: a maximum over these devices, so
that its bits are the same on every mesh.  The scale of an activation is that of the features, or of the tokens, on this
device: no product communicates.  So where the dim that is summed over is sharded, the product differs from that of
another mesh by the rounding of an activation to eight bits (docs/precision.md).

Experts multiply rows in eight bits with one scale for each matrix, and compute dw without (`layers/grouped_matmul.py`).

A device without units for the format multiplies the same numbers in wider ones: int8 exactly, float8 in float32.

int8: Jacob et al. 2018, "Quantization and Training of Neural Networks", section 2.3, https://arxiv.org/abs/1712.05877
fp8, e4m3 for activations and weights: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 3,
https://arxiv.org/abs/2209.05433
"""

import math
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt32

from shmap_tp.config.choices import MatmulPrecision, MatmulRounding
from shmap_tp.hardware.devices import Device, generation
from shmap_tp.parallel.collectives import all_gather, mark_varying, reduce_scatter, varying_axes
from shmap_tp.parallel.context_parallel import own_chunks
from shmap_tp.parallel.mesh import Role, axes_of, batch_axes, ranks
from shmap_tp.parallel.rounding import Noise, divided, mixed, rounded, rounded_in_a_kernel, scale_of, suits


class Format(NamedTuple):
    """What the operands of a product are rounded to."""

    values: Any
    """The dtype of weights, activations and gradients of activations."""
    sums: Any
    """The dtype that products are accumulated in."""
    transposed: bool = False
    """Whether devices multiply in eight bits only where the first operand is stored with the dim that is summed over as
    its last: for sums over tokens it is transposed before."""
    kernel: bool | None = None
    """Whether the kernel that rounds activations is interpreted; None: XLA rounds them."""
    in_pieces: bool = False
    """Where `transposed`: whether pieces of gradient rings are so when they are multiplied, and not by the kernel."""
    stochastic: bool = False
    """Whether gradients are rounded stochastically."""
    grouped: bool = True
    """Whether experts multiply in eight bits, too: not with stochastic rounding, on a v4, whose kernels cannot, nor on
    GPUs."""

    def round(
        self,
        x: Float[Array, "B T *F"],
        factor: Float[Array, "..."] | None = None,
        by_feature: bool = False,
        noise: Noise | None = None,
    ) -> "Rounded":
        """x * factor, in x's dtype, with a scale for each token, or for each feature; with `noise` stochastically."""
        if self.kernel is not None and suits((x,), by_feature):
            transposes = self.transposed and by_feature and not self.in_pieces
            how = by_feature, transposes, self.values, noise
            (values,), scale = rounded_in_a_kernel(self.kernel, (x,), (factor,), *how)
            return Rounded(values, scale, self._replace(transposed=self.transposed and not transposes))
        x = x if factor is None else _scaled(x, factor).astype(x.dtype)
        noise = noise and Noise(_like(x, noise.tokens), noise.features.reshape(1, 1, *x.shape[2:]))
        return Rounded(*rounded(x, (0, 1) if by_feature else _features(x), self.values, (), noise), self)

    def round_rows(
        self, xs: tuple[Float[Array, "R _"], ...], factors: tuple[Float[Array, "R 1"], ...]
    ) -> tuple[tuple[Shaped[Array, "R _"], ...], Float[Array, "R 1"]]:
        """(values of each x, scale), x * its factor ~ values x scale: one scale for a row of all x."""
        if len(xs) == 1:
            found = self.round(xs[0][None])
            return (found.values[0],), found.scale[0] * factors[0].astype(found.scale.dtype)
        xs = tuple(x[None] for x in xs)
        if self.kernel is not None and suits(xs, False):
            values, scale = rounded_in_a_kernel(self.kernel, xs, factors, False, False, self.values)
        else:
            xs = [_scaled(x, factor[None]).astype(x.dtype) for x, factor in zip(xs, factors, strict=True)]
            scale = scale_of(reduce(jnp.maximum, (jnp.max(jnp.abs(x), axis=2, keepdims=True) for x in xs)), self.values)
            values = tuple(divided(x, scale, self.values).astype(self.values) for x in xs)
        return tuple(found[0] for found in values), scale[0]


FORMATS = {
    MatmulPrecision.int8: Format(jnp.int8, jnp.int32),
    MatmulPrecision.fp8: Format(jnp.float8_e4m3fn, jnp.float32),
}


def select_format(precision: MatmulPrecision, rounding: MatmulRounding, device: Device) -> Format | None:
    """The one for devices like `device`; None where nothing is multiplied in eight bits."""
    if precision not in FORMATS:
        return None
    made = generation(device.device_kind)
    can_group = device.device_kind == "cpu" or (made is not None and made.platform != "v4")
    return FORMATS[precision]._replace(
        transposed=made is not None and made.platform in ("v5e", "v5"),  # libtpu 0.0.42 (docs/performance-notes.md)
        kernel=False if made is not None and made.has_kernels else None,
        stochastic=rounding == MatmulRounding.stochastic,
        grouped=can_group and rounding != MatmulRounding.stochastic,
    )


ROW_MAJOR = Layout(major_to_minor=(0, 1))


class Rounded(eqx.Module):
    """x ~ values x scale."""

    values: Shaped[Array, "B T *F"]
    scale: Float[Array, "..."] | None
    """None: 1."""
    to: Format = eqx.field(static=True)
    """`transposed`: not stored with T as its last dim yet."""


@runtime_checkable
class MatrixProduct(Protocol):
    """x @ w as a layer stores w, accumulated in `into`, and the product with its transpose."""

    def __call__(self, x: Array, w: Array, into: DTypeLike | None = None) -> Array: ...

    def transposed(self, dy: Array, w: Array, inputs: tuple[int, ...], into: DTypeLike | None = None) -> Array:
        """dy @ w', of shape [B T *inputs]."""
        ...

    def weight_gradient(self, x: Any, dy: Any) -> Array:
        """x' @ dy (`sum_over_tokens`), with the dims of w in their order, but heads as a dim of their own."""
        ...


class EightBit(eqx.Module):
    """A weight in eight bits, whose gradient is that of the array it was rounded from."""

    values: Shaped[Array, "..."]
    scale: Float[Array, "..."]
    """float32; of the dims of the inputs 1 element."""
    weight: Float[Array, "..."] | None
    """Takes the gradient; its values are not read.  None: the weight is frozen."""
    to: Format = eqx.field(static=True)
    inputs: tuple[int, ...] = eqx.field(static=True)
    """The dims of the input features, counted from the last."""
    random: UInt32[Array, "..."] | None = None
    """A number for each output feature, of the shape of the scale, by which gradients are rounded stochastically."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def multiply(self, product: MatrixProduct, x: Float[Array, "B T *D"]) -> Float[Array, "B T *F"]:
        """product(x, w), in x's dtype; backward both gradients.  Communication: none."""
        weight = None if self.weight is None else self.weight.astype(x.dtype)
        return _multiply(product, x, eqx.tree_at(lambda w: w.weight, self, None, is_leaf=_is_none), weight)

    def product(self, product: MatrixProduct, x: Float[Array, "B T *D"]) -> Float[Array, "B T *F"]:
        """The same, not to be differentiated."""
        rounded = self.to.round(x)
        y = product(rounded.values, self.values, self.to.sums)
        return _scaled(y, _like(y, rounded.scale), self._scale_of(y)).astype(x.dtype)

    def gradients(
        self, product: MatrixProduct, x: Float[Array, "B T *D"], dy: Float[Array, "B T *F"]
    ) -> tuple[Float[Array, "B T *D"], "Rounded", "Rounded"]:
        """dx = dy @ w', in dy's dtype, and x and dy of dw = x' @ dy (`sum_over_tokens`).  Communication: none."""
        dy = lax.optimization_barrier(dy)  # else XLA keeps it in float32 (docs/performance-notes.md)
        by_token, x = self.to.round(dy, self._scale_of(dy), noise=self._noise(dy, 0)), self.to.round(x)
        dx = product.transposed(by_token.values, self.values, x.values.shape[2:], self.to.sums)
        dx = _scaled(dx, _like(dx, by_token.scale)).astype(dy.dtype)
        by_feature = self.to.round(dy, _like(dy, x.scale), by_feature=True, noise=self._noise(dy, 1))
        return dx, Rounded(x.values, None, x.to), by_feature

    def gathered(self, axes: Any, dim: int) -> "EightBit":
        """Shards along `dim` -> the whole, which has the gradient of `weight` as if that had been gathered.  The scale
        is that of the whole already.

        Communication: one all-gather of the values; backward one reduce-scatter of the gradient, in the dtype of
        `weight`.
        """
        weight = None if self.weight is None else _as_if_gathered(self.weight, axes, dim)
        return replace(self, values=all_gather(self.values, axes, dim), weight=weight)

    def with_scale_gathered(self, axes: tuple[str, ...], dim: int) -> "EightBit":
        """The same, with the scale of all outputs that are sharded over `axes` along `dim`: once a step, because it is
        small.  Communication: one all-gather of it, if `dim` is one of the outputs, and one of `random`."""
        if dim in self.inputs:
            return self
        scale, random = jax.tree.map(lambda each: all_gather(each, axes, dim), (self.scale, self.random))
        return replace(self, scale=scale, random=random)

    def _scale_of(self, y: Array) -> Array:
        return self.scale.reshape(1, 1, *y.shape[2:])

    def _noise(self, dy: Array, use: int) -> Noise | None:
        """The random numbers of dy for one of the two times that it is rounded."""
        if self.random is None:
            return None
        batch, time = dy.shape[0], dy.shape[1] * ranks(axes_of(Role.time))
        row = lax.axis_index(batch_axes()) * batch + jnp.arange(batch)
        token = row[:, None] * time + own_chunks(jnp.arange(time))[None]
        return Noise(mixed(2 * token.astype(jnp.uint32) + use)[..., None], self.random.reshape(1, 1, -1))


def sum_over_tokens(first: Array | Rounded, second: Array | Rounded) -> Float[Array, "..."]:
    """first' @ second, [*features of first, *features of second], accumulated in 32 bits (or wider), given in float32
    (or wider).  Communication: none."""
    if not (isinstance(first, Rounded) and isinstance(second, Rounded)):
        wide = jnp.promote_types(first.dtype, jnp.float32)
        return jnp.tensordot(first, second, axes=((0, 1), (0, 1)), preferred_element_type=wide)
    x, y = (a.values.reshape(-1, math.prod(a.values.shape[2:])) for a in (first, second))
    if first.to.transposed and not second.to.transposed:
        dw = jnp.matmul(y.T, x, preferred_element_type=first.to.sums).T
    else:
        if first.to.transposed:
            x = with_layout_constraint(with_layout_constraint(x, ROW_MAJOR).T, ROW_MAJOR).T
        dw = jnp.matmul(x.T, y, preferred_element_type=first.to.sums)
    scales = [a.scale.reshape(to) for a, to in ((first, (-1, 1)), (second, (1, -1))) if a.scale is not None]
    return _scaled(dw, *scales).reshape(*first.values.shape[2:], *second.values.shape[2:])


def in_eight_bits(rounding: Any, params: Any, step: int | Int[Array, ""] = 0) -> Any:
    """`params`, in eight bits where `rounding`, a tree like them, has a function of one and of the step; with None as
    they are.  Communication: that of `rounded`."""
    if rounding is None:
        return params
    return jax.tree.map(lambda to_eight, w: to_eight(w, step) if to_eight else w, rounding, params, is_leaf=_is_none)


def with_other_noise(params: Any, microbatch: Int[Array, ""] | None) -> Any:
    """`params`, in whose products gradients are rounded with random numbers of this microbatch; with None as they
    are."""

    def of_microbatch(w: Any) -> Any:
        return replace(w, random=mixed(w.random + microbatch.astype(jnp.uint32))) if has_noise(w) else w

    return params if microbatch is None else jax.tree.map(of_microbatch, params, is_leaf=has_noise)


def has_noise(w: Any) -> bool:
    """Whether this is a weight for which gradients are rounded stochastically."""
    return isinstance(w, EightBit) and w.random is not None


def of_gradient(is_trained: Any, params: Any) -> Any:
    """For each array of `params`, whether the gradient of a step is that of it, by `is_trained` of each parameter."""

    def of(trained: bool, w: Any) -> Any:
        if not isinstance(w, EightBit):
            return trained
        found = (False, False, trained, None if w.random is None else False)
        return eqx.tree_at(lambda w: (w.values, w.scale, w.weight, w.random), w, found, is_leaf=_is_none)

    return jax.tree.map(of, is_trained, params)


def gradients_of_arrays(gradients: Any) -> Any:
    """The same, with that of its array in the place of each `EightBit`; None where it is frozen."""

    def is_eight_bit(dw: Any) -> bool:
        return isinstance(dw, EightBit)

    return jax.tree.map(lambda dw: dw.weight if is_eight_bit(dw) else dw, gradients, is_leaf=is_eight_bit)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(product: MatrixProduct, x: Array, w: EightBit, weight: Array | None) -> Array:
    """The plain version has no gradient: rounding has none.  Without rounding it is product(x, weight)."""
    return w.product(product, x)


def _forward(product: MatrixProduct, x: Array, w: EightBit, weight: Array | None) -> tuple[Array, tuple]:
    return w.product(product, x), (x, w, None if weight is None else ())


def _backward(product: MatrixProduct, saved: tuple, dy: Array) -> tuple:
    x, w, trained = saved
    dx, *pair = w.gradients(product, x, dy)
    return dx, None, None if trained is None else product.weight_gradient(*pair).reshape(w.shape).astype(x.dtype)


_multiply.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _as_if_gathered(shard: Array, axes: Any, dim: int) -> Array:
    """Zeros of the shape and type of `all_gather(shard, axes, dim)`, and its gradient: nobody reads the values."""
    shape = jax.eval_shape(lambda x: all_gather(x, axes, dim), shard).shape
    return mark_varying(jnp.zeros(shape, shard.dtype), tuple(sorted(varying_axes(shard))))


_as_if_gathered.defvjp(
    lambda shard, axes, dim: (_as_if_gathered(shard, axes, dim), None),
    lambda axes, dim, _, dw: (reduce_scatter(dw, axes, dim),),
)


def _is_none(x: Any) -> bool:
    return x is None


def _features(x: Array) -> tuple[int, ...]:
    """All dims but batch and time."""
    return tuple(range(2, x.ndim))


def _wide(x: Array) -> Any:
    """float32, or the dtype of x if that is wider."""
    return jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32


def _like(y: Array, scale: Array) -> Array:
    """The scale of rows, with as many dims as y."""
    return scale.reshape(*scale.shape[:2], *[1] * (y.ndim - 2))


def _scaled(x: Array, *scales: Array) -> Array:
    x = x.astype(_wide(x))
    for scale in scales:
        x = x * scale.astype(x.dtype)
    return x
