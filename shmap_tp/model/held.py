"""What the parameters of a model that is used are held in: the dtype that it computes in, or int8."""

from functools import partial
from typing import Any

import jax
from jax.typing import DTypeLike

from shmap_tp.errors import UserError
from shmap_tp.model.adapters import is_factor
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.partitioning import ParameterKind, declaration
from shmap_tp.parallel.quantized import is_quantized, quantize, quantized_shape


def held_in(shapes: Transformer, dtype: DTypeLike, *, int8: bool = False) -> Transformer:
    """`shapes`, which have shardings, with the matrices of `dtype`.  Vectors, which norms compute with, stay as they
    are.

    A model that computes in `dtype` gives the same bits: every use of a matrix casts it to that first.  With `int8` the
    matrices of the blocks that mp shards are `Quantized`; embedding, head, routers and factors of adapters are not.
    """

    def held(path: tuple, leaf: jax.ShapeDtypeStruct) -> Any:
        declared = declaration(shapes, path)
        if declared.kind == ParameterKind.vector:
            return leaf
        whole = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
        is_quantizable = declared.stacked and any(declared.axes) and not is_factor(path)
        return quantized_shape(whole, declared.inputs) if int8 and is_quantizable else whole

    return jax.tree_util.tree_map_with_path(held, shapes)


def quantized_as(held: Transformer, parameters: Transformer) -> Transformer:
    """`parameters`, with those in int8 that are so in `held`.  One array after the other is converted, and freed if the
    caller does not keep it.  Communication: as `quantize`."""
    leaves, structure = jax.tree.flatten(held, is_leaf=is_quantized)
    arrays = jax.tree.leaves(parameters)
    del parameters
    for number, leaf in enumerate(leaves):
        if is_quantized(leaf):
            shardings = jax.tree.map(lambda part: part.sharding, leaf)
            convert = jax.jit(partial(quantize, inputs=leaf.inputs), out_shardings=shardings)
            arrays[number] = jax.block_until_ready(convert(arrays[number]))
    return jax.tree.unflatten(structure, arrays)


def require_unquantized(parameters: Transformer, use: str) -> None:
    """Raise UserError if any parameter is in int8; `use` says what is to be done with them, as a participle."""
    if any(map(is_quantized, jax.tree.leaves(parameters, is_leaf=is_quantized))):
        raise UserError(f'a model held in int8 cannot be {use}: read it with dtype="float32" or "bfloat16"')
