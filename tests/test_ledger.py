"""What each layer, block and program says on the wire, read from its jaxpr: kind, axis, size, how often; no more.

B windows on this device, T time, D model width, N key/value heads, K head dim, L layers, A microbatches.  The counts do
not depend on the mesh, except that more devices of mp than key/value heads sum the gradients of those.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
import test_layers
import test_loss
from hlo import Wire, counted, wires
from sharded import Case, on_mesh
from small import MESHES, config, every_mesh, mesh, shapes_of

from shmap_tp.sharding import partition_specs
from shmap_tp.step import build_programs

# layer: (key/value heads, where it has any; all-reduces of B T D values over mp forward, and backward)
LAYERS = {
    "column": (None, 0, 1),
    "row": (None, 1, 0),
    "gelu": (None, 1, 1),
    "swiglu": (None, 1, 1),
    "layernorm": (None, 0, 0),
    "rmsnorm": (None, 0, 0),
    "embedding": (None, 1, 0),
    "head": (None, 0, 1),
    "learned": (None, 0, 0),
    "rotary": (None, 0, 0),
    "key_value_2_of_8": (2, 0, 1),
    "attention_alibi": (8, 1, 1),
    "attention_alibi_24_heads": (24, 1, 1),
    "attention_rotary_1_of_8_in_chunks_of_3": (1, 1, 1),
    "parallel_block_2_of_8": (2, 1, 1),
    "sequential_block": (8, 2, 2),
}


def over_mp(case: Case, shape: tuple[int, int]) -> tuple[Counter, Counter]:
    """(forward, backward): how often each (kind, size) travels over mp, which is the only axis a layer talks over."""
    params, inputs = case.arrays("float32")
    specs = partition_specs(shapes_of(case.make), dict(mesh(shape).shape))
    forward = jax.shard_map(case.call, mesh=mesh(shape), in_specs=(specs, *case.layouts), out_specs=case.out)
    found = wires(jax.make_jaxpr(forward)(params, *inputs).jaxpr)
    assert all(wire.axes == ("mp",) for wire in found)
    out = jax.eval_shape(forward, params, *inputs)
    both = wires(jax.make_jaxpr(on_mesh(case, mesh(shape)))(params, inputs, out).jaxpr)
    return sizes(found), sizes([wire for wire in both if wire.axes == ("mp",)]) - sizes(found)


def sizes(found: list[Wire]) -> Counter:
    return Counter((wire.kind, wire.size) for wire in found)


@every_mesh
@pytest.mark.parametrize("layer", test_layers.LAYERS)
def test_a_layer_talks_as_its_docstring_says(layer, shape):
    dp, mp = shape
    kv_heads, forward, backward = LAYERS[layer]
    x = ("all_reduce", test_layers.B // dp * test_layers.T * test_layers.D)
    expected = (Counter({x: forward}), Counter({x: backward}))
    if kv_heads is not None and mp > kv_heads:
        projections = 1 if layer.startswith("key_value") else 2  # key, value
        expected[1]["all_reduce", test_layers.D * kv_heads * test_layers.K] += projections
    assert over_mp(test_layers.LAYERS[layer], shape) == expected


@every_mesh
def test_the_loss_talks_as_its_docstring_says(shape):
    each = test_loss.B // shape[0] * test_loss.T
    forward, backward = over_mp(test_loss.LOSSES["all columns are real"], shape)
    assert forward == {("max", each): 1, ("all_reduce", each): 2}
    assert not backward


BLOCKS = {
    # what: (settings, all-reduces of a layer over mp forward, backward, and once more to recompute)
    "parallel": (["model.block=parallel"], 1, 1, 0),
    "parallel dots": (["model.block=parallel", "model.remat=dots"], 1, 1, 0),
    "parallel full": (["model.block=parallel", "model.remat=full"], 1, 1, 0),
    "sequential": (["model.block=sequential"], 2, 2, 0),
    "sequential dots": (["model.block=sequential", "model.remat=dots"], 2, 2, 0),
    "sequential full": (["model.block=sequential", "model.remat=full"], 2, 2, 1),
    "in chunks": (["model.attention_chunk=3"], 1, 1, 0),
    "in chunks, full": (["model.attention_chunk=3", "model.remat=full"], 1, 1, 0),
}
A, L = 2, 3


@pytest.mark.parametrize(
    ("block", "shape"),
    [(block, (2, 4)) for block in BLOCKS] + [("sequential full", shape) for shape in MESHES if shape != (2, 4)],
    ids=str,
)
def test_the_programs_talk_as_their_docstrings_say(block, shape):
    settings, forward, backward, again = BLOCKS[block]
    conf = config(f"mesh.dp={shape[0]}", f"mesh.mp={shape[1]}", f"model.layers={L}", "train.batch=16",
                  f"train.microbatches={A}", *settings)  # fmt: skip
    made = build_programs(conf, mesh(shape), jnp.float32)
    leaves = len(jax.tree.leaves(made.shapes.params))
    embedding, loss, head = 1, 2, 1  # forward, forward, backward
    counting_targets, loss_of_step, norm_of_gradients = 1, 1, 1
    assert counted(wires(jax.make_jaxpr(made.step)(made.shapes, made.tokens).jaxpr)) == {
        ("all_reduce", ("mp",)): A * (embedding + L * (forward + backward + again) + loss + head) + norm_of_gradients,
        ("max", ("mp",)): A,
        ("all_reduce", ("dp",)): counting_targets + loss_of_step + leaves,
    }
    assert counted(wires(jax.make_jaxpr(made.evaluate)(made.shapes.params, made.tokens).jaxpr)) == {
        ("all_reduce", ("mp",)): A * (embedding + L * forward + loss),
        ("max", ("mp",)): A,
        ("all_reduce", ("dp",)): counting_targets + loss_of_step,
    }
    assert not wires(jax.make_jaxpr(made.init)().jaxpr)


def test_only_activations_travel_in_bfloat16():
    """Gradients of parameters, those of replicated key/value heads too, and all sums of the loss travel in float32."""
    conf = config("mesh.dp=2", "mesh.mp=4", "model.kv_heads=2", "train.batch=16", "train.microbatches=2")
    made = build_programs(conf, mesh((2, 4)), jnp.bfloat16)
    found = wires(jax.make_jaxpr(made.step)(made.shapes, made.tokens).jaxpr)
    activations = 4 * conf.model.context * conf.model.width
    assert {wire.size for wire in found if wire.dtype == "bfloat16"} == {activations}
    assert {wire.dtype for wire in found if wire.axes == ("mp",) and wire.size == activations} == {"bfloat16"}
    assert {wire.dtype for wire in found} == {"bfloat16", "float32", "int32"}
