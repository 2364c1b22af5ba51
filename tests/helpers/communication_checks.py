"""Checks that the collectives of a traced layer or step are exactly those of the rules written down by hand.

B sequences on this device, T time, D model width.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from shmap_tp.config.choices import TensorParallelMode
from shmap_tp.config.schema import Config, ModelConfig
from shmap_tp.parallel.mesh import DP, MP, axis_sizes
from shmap_tp.parallel.partitioning import partition_specs
from shmap_tp.plan.ledger import Direction, Entry, communication_in_jaxpr, without_trivial_axes
from shmap_tp.training.step import CONFIGURED, Components, build_step_functions
from tests.helpers import communication_rules
from tests.helpers.communication_rules import (
    ArrayTraffic,
    all_reduce_once,
    attention,
    block,
    entering,
    key_value,
    reducing,
    sublayer,
    tally,
)
from tests.helpers.layer_cases import LAYERS, RESIDUAL_STREAM
from tests.helpers.model_fixtures import config, mesh, mesh_config, mesh_of, shapes_of
from tests.helpers.sharded_harness import ALL_REDUCE, COLLECTIVE_MATMUL, SEQUENCE, Case, on_mesh


def model(*settings: str) -> ModelConfig:
    """A model of the sizes that `layer_cases` uses."""
    return config(*[f"model.{setting}" for setting in settings]).model


BY_HAND = {
    "column": lambda x, mesh: entering(mesh, "x", x),
    "row": lambda x, mesh: reducing(mesh, "x", x),
    "gelu": sublayer,
    "swiglu": sublayer,
    "layernorm": lambda x, mesh: [],
    "rmsnorm": lambda x, mesh: [],
    "embedding": lambda x, mesh: reducing(mesh, "x", x),
    "head": lambda x, mesh: entering(mesh, "x", x),
    "learned": lambda x, mesh: [],
    "rotary": lambda x, mesh: [],
    "key_value_2_of_8": lambda x, mesh: [*entering(mesh, "x", x), *key_value(model("kv_heads=2"), mesh, 1)],
    "attention_alibi": lambda x, mesh: [*sublayer(x, mesh), *attention(model(), mesh, x)],
    "attention_alibi_24_heads": lambda x, mesh: [
        *sublayer(x, mesh), *attention(model("heads=24", "kv_heads=24"), mesh, x)
    ],
    "attention_rotary_1_of_8_in_chunks_of_3": lambda x, mesh: [
        *sublayer(x, mesh), *attention(model("kv_heads=1"), mesh, x)
    ],
    "parallel_block_2_of_8": lambda x, mesh: block(model("kv_heads=2"), mesh, x),
    "sequential_block": lambda x, mesh: block(model("block=sequential"), mesh, x),
}  # fmt: skip
"""Name of a layer -> its collectives over mp, from the residual stream x[B T D] and the mesh."""

MODE_NAMES = {
    ALL_REDUCE: TensorParallelMode.all_reduce,
    SEQUENCE: TensorParallelMode.sequence,
    COLLECTIVE_MATMUL: TensorParallelMode.collective_matmul,
}


def check_layer(name: str, shape: tuple[int, int]) -> None:
    """Asserts that one of LAYERS communicates on this mesh as BY_HAND says."""
    case, (layer, _, mode) = LAYERS[name], name.partition(", ")
    (batch, time, width), _ = RESIDUAL_STREAM[case.tp]
    assert MODE_NAMES[case.tp] == (mode or TensorParallelMode.all_reduce), "the name of the case is wrong"
    x = ArrayTraffic(batch // shape[0] * time * width, "float32", 1)
    check_case(case, shape, BY_HAND[layer](x, mesh_config(*shape, tensor_parallel=MODE_NAMES[case.tp])))


def check_case(case: Case, shape: tuple[int, int], by_hand: list[Entry]) -> None:
    """Asserts that a case communicates so in its forward pass, and in both passes together; the reductions of its
    parameters' gradients are not part of `by_hand`."""
    forward, both, gradient_reductions = traced_communication(case, shape)
    assert tally(forward) == tally(entry for entry in by_hand if entry.direction == Direction.forward)
    assert tally(both) == tally([*by_hand, *gradient_reductions])


def traced_communication(case: Case, shape: tuple[int, int]) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """(collectives of the forward pass, of both passes, those of both passes that reduce parameters' gradients)."""
    params, inputs = case.arrays("float32")
    specs = partition_specs(shapes_of(case.make), dict(mesh(shape).shape))
    forward = jax.shard_map(case.call, mesh=mesh(shape), in_specs=(specs, *case.input_specs), out_specs=case.out)
    out = jax.eval_shape(forward, params, *inputs)
    both = jax.make_jaxpr(on_mesh(case, mesh(shape)))(params, inputs, out).jaxpr
    local_sizes = jax.tree.map(lambda x, spec: x.size // (shape[1] if MP in spec else 1), params, specs)
    sizes, all_specs = jax.tree.leaves(local_sizes), jax.tree.leaves(specs)
    replicated = [size for size, spec in zip(sizes, all_specs, strict=True) if MP not in spec]
    reduced = {DP: sizes, MP: [] if case.tp == ALL_REDUCE else replicated}
    dw = [(axis, ArrayTraffic(size, "float32", 1)) for axis, sizes in reduced.items() for size in sizes]
    gradient_reductions = [all_reduce_once(axis, "dw", x) for axis, x in dw]
    in_forward = communication_in_jaxpr(jax.make_jaxpr(forward)(params, *inputs).jaxpr)
    return in_forward, communication_in_jaxpr(both), gradient_reductions


PROGRAMS = {
    "parallel": "",
    "parallel, remat full": "remat=full",
    "sequential": "block=sequential",
    "sequential, remat attention": "block=sequential remat=attention",
    "sequential, remat full": "block=sequential remat=full",
    "2 kv heads": "kv_heads=2 positions=rotary mlp=swiglu norm=rmsnorm",
    "fsdp": "kv_heads=2 positions=learned mesh.zero=fsdp",
    "fsdp ring": "kv_heads=2 mesh.zero=fsdp mesh.fsdp_gradients=ring",
    "1 kv head, sequential, remat full": (
        "kv_heads=1 block=sequential remat=full positions=learned tie_embeddings=true"
    ),
}
"""Name -> settings of a step; `model.` is left out."""
PROGRAMS |= {
    f"{program}; {mode}": f"{settings} mesh.tensor_parallel={mode} context=8"
    for mode in ("sequence", "collective_matmul")
    for program, settings in PROGRAMS.items()
}


def program_config(program: str, shape: tuple[int, int]) -> Config:
    """One of PROGRAMS, or other settings, with two microbatches and three layers."""
    sizes = f"mesh.dp={shape[0]} mesh.mp={shape[1]} model.layers=3 train.batch=16 train.microbatches=2"
    settings = [
        setting if re.match("(mesh|train|optimizer)[.]", setting) else f"model.{setting}"
        for setting in PROGRAMS.get(program, program).split()
    ]
    return config(*sizes.split(), *settings)


def by_direction(entries: Iterable[Entry]) -> dict[Direction, Counter[Any]]:
    entries = list(entries)
    return {direction: tally(entry for entry in entries if entry.direction == direction) for direction in Direction}


def step_communication(conf: Config, precision: str, components: Components = CONFIGURED) -> list[Entry]:
    """The collectives of a step of `conf` as it is traced."""
    made = build_step_functions(conf, mesh_of(conf), jnp.dtype(precision), components)
    return communication_in_jaxpr(jax.make_jaxpr(made.step)(made.shapes, made.tokens).jaxpr)


def check_step(conf: Config, precision: str) -> None:
    """Asserts that a step communicates what is written down by hand (`communication_rules.py`): in each direction every
    array as often, as large and in the dtype, and nothing else."""
    sizes = axis_sizes(conf.mesh)
    found = without_trivial_axes(step_communication(conf, precision), sizes)
    expected = without_trivial_axes(communication_rules.step(conf, precision), sizes)
    assert by_direction(found) == by_direction(expected)
