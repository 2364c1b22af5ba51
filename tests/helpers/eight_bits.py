"""Layers and programs whose products are in eight bits, and their errors beside float64."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
from jax.sharding import Mesh

from shmap_tp.config.choices import MatmulPrecision, MatmulRounding
from shmap_tp.model.sharded_model import eight_bit_weights
from shmap_tp.parallel.eight_bit import in_eight_bits, select_format
from shmap_tp.parallel.partitioning import partition_specs
from tests.helpers.assertions import by_path
from tests.helpers.model_fixtures import shapes_of
from tests.helpers.sharded_harness import Case, cotangent_of, expected, on_mesh
from tests.helpers.step_fixtures import Program, step_config

INT8, FP8 = MatmulPrecision.int8, MatmulPrecision.fp8
NEAREST, STOCHASTIC = MatmulRounding
ROUNDING = 5e-3
"""By how much losses in eight bits differ between meshes.  Measured, jax 0.10.2: 3e-3 (bfloat16: 1.1e-3)."""


def rounded_case(case: Case, precision: MatmulPrecision, on: Mesh) -> Case:
    """The case with products in eight bits.  The operands of sums over tokens are stored as for v5p."""
    shapes = shapes_of(case.make)
    specs = partition_specs(shapes, dict(on.shape))
    to = select_format(precision, NEAREST, SimpleNamespace(device_kind="TPU v5"))
    rounding = eight_bit_weights(shapes, specs, jax.tree.map(lambda _: True, shapes), to)

    def call(layer, x):
        return case.call(in_eight_bits(rounding, layer), x)

    return replace(case, call=call)


def errors_of(case: Case, precision: MatmulPrecision, on: Mesh) -> dict[str, float]:
    """|found - expected| / |expected| of the output and of each gradient; expected is that of the dense reference in
    float64."""
    params, inputs = case.arrays("float32")
    found = jax.jit(on_mesh(rounded_case(case, precision, on), on))(params, inputs, cotangent_of(case))
    found, wanted = (
        {"out": jax.tree.leaves(x["out"])[0], "dx": x["d_inputs"][0]} | by_path(x["d_params"])
        for x in (found, expected(case))
    )
    return {name: float(np.linalg.norm(found[name] - wanted[name]) / np.linalg.norm(wanted[name])) for name in wanted}


def program(shape: tuple[int, int], precision: MatmulPrecision, settings: str = "") -> Program:
    model = "model.block=sequential model.mlp=swiglu model.kv_heads=4 model.context=8"
    return Program(step_config(shape, *model.split(), f"train.matmul_precision={precision}", *settings.split()))
