"""Between slices each shard is sent once per step, and nothing else: as traced and as compiled."""

from math import prod

import jax.numpy as jnp
import pytest

from shmap_tp.parallel.mesh import DP_SLICE
from shmap_tp.plan.compiled_communication import inter_slice_communication
from shmap_tp.plan.ledger import Direction, Operation, bytes_by_operation
from shmap_tp.plan.predict import predict, step_communication
from shmap_tp.plan.tpu import Slice
from tests.helpers.model_fixtures import config

TWO_SLICES = ["mesh.dp=8", "mesh.mp=1", "mesh.slices=2", "train.batch=16", "train.microbatches=2"]
TWO = 'send(%x, %after-all), frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type='
MODULE = f"""HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[2,8]) -> f32[2,8] {{
  %x = f32[2,8]{{1,0}} parameter(0)
  %after-all = token[] after-all()
  %send = (f32[2,8]{{1,0:T(2,128)}}, u32[], token[]) {TWO}"ALL_GATHER"}}
  %send.1 = (bf16[4,8]{{1,0}}, u32[], token[]) {TWO}"REDUCE_SCATTER"}}
  %send.2 = (s32[1,1,128]{{2,1,0}}, u32[], token[]) {TWO}"ALL_REDUCE"}}
  ROOT %y = f32[2,8]{{1,0}} copy(%x)
}}
"""


def test_arrays_sent_to_other_slices_are_read_and_those_of_an_unknown_collective_rejected():
    found = inter_slice_communication(MODULE)
    assert [(entry.operation, entry.dtype, entry.bytes) for entry in found] == [
        (Operation.all_gather, "float32", 64), (Operation.reduce_scatter, "bfloat16", 64),
        (Operation.all_reduce, "int32", 512),
    ]  # fmt: skip
    assert {(entry.axis, entry.count, entry.direction) for entry in found} == {(DP_SLICE, 1, Direction.once)}
    with pytest.raises(ValueError, match=r"send\.1: its collective"):
        inter_slice_communication(MODULE.replace("REDUCE_SCATTER", "ALL_TO_ALL"))


@pytest.mark.parametrize("zero", ["zero1", "fsdp", "fsdp mesh.fsdp_gradients=ring"])
def test_each_shard_is_sent_between_slices_once_per_step(zero):
    """1/4 of the gradient of each matrix, for slices of four devices, whatever the number of microbatches."""
    conf = config(*TWO_SLICES, *f"mesh.zero={zero}".split())
    entries = [entry for entry in step_communication(conf, jnp.bfloat16) if entry.axis == DP_SLICE]
    assert {entry.direction for entry in entries} == {Direction.once}
    gradients = sum(entry.total for entry in entries if entry.operation == Operation.reduce_scatter)
    matrices = 2 * (4 * 24 * 32 + 2 * 24 * 40) + 2 * 64 * 24
    assert gradients == 4 * matrices / 4


@pytest.mark.parametrize("gradients", ["reduce_scatter", "ring"])
def test_the_compiled_step_sends_what_is_planned(gradients):
    pytest.importorskip("libtpu")
    sizes = "width=256 ffn=512 head_dim=128 heads=4 kv_heads=4 context=8 attention=chunked vocabulary_multiple=64"
    fsdp = "mesh.zero=fsdp", f"mesh.fsdp_gradients={gradients}"
    conf = config(*[f"model.{size}" for size in sizes.split()], *fsdp, *TWO_SLICES)
    prediction = predict(conf, Slice("v5e", (2, 2), 2), cache=None)
    found = inter_slice_communication(prediction.text)
    others = [entry for entry in found if entry.operation != Operation.all_reduce]
    traced = [entry for entry in prediction.communication if entry.axis == DP_SLICE]
    assert bytes_by_operation(others) == bytes_by_operation(traced) and traced
    full_weight = prod((2, 256, 512)) * 4
    assert max(entry.bytes for entry in found) <= full_weight / 4
