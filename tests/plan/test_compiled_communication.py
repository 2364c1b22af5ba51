"""Collectives read from compiled modules: operation, axis, size and count; none is missed.

The TPU texts are excerpts of modules that libtpu 0.0.42 makes for a v5e 4x4 as a (4, 4) mesh, most attributes omitted.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.plan.compiled_communication import communication_in_hlo, replica_groups
from shmap_tp.plan.ledger import (
    Direction,
    Entry,
    Operation,
    bytes_by_operation,
    communication_in_jaxpr,
    comparison,
)
from tests.helpers.communication_rules import tally
from tests.helpers.model_fixtures import mesh

SIZES = {DP: 4, MP: 4}


def all_collectives(x):
    """Every kind of collective but all-to-all, three times in a loop, over either axis or both."""

    def body(total, _):
        gathered = lax.all_gather(total, DP, axis=0, tiled=True)
        part = lax.psum_scatter(mark_varying(gathered * 2, MP), MP, scatter_dimension=1, tiled=True)
        part = lax.ppermute(part, MP, [(i, (i + 1) % 4) for i in range(4)])
        size = lax.pmax(jnp.max(part), DP) + lax.psum(jnp.sum(part), (DP, MP))
        return mark_varying(mark_varying(total + size, DP), MP), None

    return lax.psum(jnp.sum(lax.scan(body, x, length=3)[0]), (DP, MP))


@pytest.mark.parametrize("order", [range(8), [5, 0, 3, 6, 1, 7, 4, 2]], ids=["in order", "shuffled"])
def test_the_compiled_collectives_are_the_traced_ones(order):
    """Groups are numbered by positions in the mesh, whatever the ids of the devices."""
    mesh = Mesh(np.array(jax.devices())[list(order)].reshape(2, 4), (DP, MP), axis_types=(AxisType.Auto,) * 2)
    run = jax.jit(jax.shard_map(all_collectives, mesh=mesh, in_specs=P(DP, MP), out_specs=P()))
    x = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    traced = communication_in_jaxpr(jax.make_jaxpr(run)(x).jaxpr)
    assert {entry.operation for entry in traced} == set(Operation) - {Operation.all_to_all}
    assert {(entry.axis, entry.count) for entry in traced} == {(DP, 3), (MP, 3), (f"{DP} {MP}", 3), (f"{DP} {MP}", 1)}
    found = communication_in_hlo(run.lower(x).compile().as_text(), dict(mesh.shape))
    assert bytes_by_operation(found) == bytes_by_operation(traced)


def test_the_bytes_of_an_operation_over_an_axis_are_compared_however_they_are_sent():
    """Arrays of a loop may be sent stacked after it, or several in one; an all-reduce is no reduce-scatter."""

    def entry(operation: Operation, size: int, count: int) -> Entry:
        return Entry("dw", operation, MP, "float32", size, count, Direction.backward)

    single, stacked, fewer = (entry(Operation.all_reduce, *each) for each in ((1024, 4), (4096, 1), (1024, 3)))
    assert comparison([single], [stacked]).splitlines()[0] == "as traced"
    first, head, line = comparison([single], [fewer]).splitlines()
    assert first.startswith("not all as traced; no fault where the compiler gathers once what is used twice")
    assert head.split() == ["operation", "axis", "traced", "compiled", "more"]
    assert line.split() == ["all-reduce", "mp", "4.0", "KiB", "3.0", "KiB", "-1.0", "KiB"]
    scattered = comparison([entry(Operation.reduce_scatter, 1024, 4)], [single]).splitlines()[2:]
    assert [line.split()[2:] for line in scattered] == [
        ["0", "B", "4.0", "KiB", "4.0", "KiB"], ["4.0", "KiB", "0", "B", "-4.0", "KiB"]
    ]  # fmt: skip


def one_collective(attributes: str, opcode: str = "all-reduce") -> str:
    """A module with a single collective."""
    return f"""
%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[8,16]) -> f32[8,16] {{
  %x = f32[8,16]{{1,0:T(8,128)}} parameter(0)
  ROOT %collective = f32[8,16]{{1,0:T(8,128)}} {opcode}(%x), channel_id=1, {attributes}, to_apply=%sum
}}
"""


ROWS = "{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}"
PAIRS = "[[0, 5], [1, 4], [2, 7], [3, 6], [8, 13], [9, 12], [10, 15], [11, 14]]"
GROUPS = {
    f"{{{ROWS}}}": MP,
    "{{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}": DP,
    "[4,4]<=[16]": MP,
    "[4,4]<=[4,4]T(1,0)": DP,
    "[1,16]<=[16]": f"{DP} {MP}",
    "{}": f"{DP} {MP}",
    "mesh['dp'=4,'mp'=4] {'mp'}": MP,
    "mesh['dp'=4,'mp'=4] {'dp','mp'}": f"{DP} {MP}",
    "[8,2]<=[16]": str([[i, i + 1] for i in range(0, 16, 2)]),  # pairs of adjacent mp ranks, which are no axis
    PAIRS.replace("[", "{").replace("]", "}").replace(" ", ""): PAIRS,  # no axis of this mesh
}


@pytest.mark.parametrize("groups", GROUPS)
def test_the_axis_is_determined_by_the_replica_groups(groups):
    (entry,) = communication_in_hlo(one_collective(f"replica_groups={groups}"), SIZES)
    assert entry == Entry("collective", Operation.all_reduce, GROUPS[groups], "float32", 512, 1, Direction.once)


def test_a_group_of_one_device_does_not_communicate():
    alone = ",".join(f"{{{i}}}" for i in range(16))
    assert communication_in_hlo(one_collective(f"replica_groups={{{alone}}}"), SIZES) == []
    assert communication_in_hlo(one_collective("replica_groups={{0}}"), {DP: 1, MP: 1}) == []


def test_an_unknown_collective_is_rejected():
    with pytest.raises(ValueError, match="unknown collective: ragged-all-to-all"):
        communication_in_hlo(one_collective(f"replica_groups={{{ROWS}}}", "ragged-all-to-all"), SIZES)
    with pytest.raises(ValueError, match="unknown notation of replica groups"):
        communication_in_hlo(one_collective("replica_groups=@somewhere"), SIZES)


REDUCE_SCATTER = """
%region_7.7.clone (a: f32[], b: f32[]) -> bf16[] {
  %a = bf16[]{:T(256)} parameter(0)
  %b = bf16[]{:T(256)} parameter(1)
  ROOT %add.65 = bf16[]{:T(256)} add(%a, %b), metadata={op_name="checkpoint/add" stack_frame_id=11}
}

%all-reduce-scatter.clone.1 (input.2: bf16[2048,2048]) -> bf16[528,2048] {
  %input.2 = bf16[2048,2048]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %constant.182 = bf16[] constant(0)
  %pad.2 = bf16[2112,2048]{1,0:T(8,128)(2,1)} pad(%input.2, %constant.182), padding=0_64x0_0
  %all-reduce.3 = bf16[2112,2048]{1,0:T(8,128)(2,1)} all-reduce(%pad.2), channel_id=9, replica_groups={{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}, use_global_device_ids=true, to_apply=%region_7.7.clone
  ROOT %dynamic-slice.12 = bf16[528,2048]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%all-reduce.3, %multiply.10, %constant.184), dynamic_slice_sizes={528,2048}
}

ENTRY %main (x: bf16[2048,2048]) -> bf16[576,2048] {
  %x = bf16[2048,2048]{1,0:T(8,128)(2,1)} parameter(0)
  %fusion.106 = bf16[528,2048]{1,0:T(8,128)(2,1)S(1)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.clone.1
  %slice.2 = bf16[48,2048]{1,0:T(8,128)(2,1)S(1)} slice(%fusion.106), slice={[480:528], [0:2048]}
  %collective-permute-start.2 = (bf16[48,2048]{1,0:T(8,128)(2,1)S(1)}, bf16[48,2048]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%slice.2), channel_id=1, source_target_pairs={{0,4},{4,8},{8,12},{1,5},{5,9},{9,13},{2,6},{6,10},{10,14},{3,7},{7,11},{11,15}}
  %collective-permute-done.2 = bf16[48,2048]{1,0:T(8,128)(2,1)S(1)} collective-permute-done(%collective-permute-start.2)
  ROOT %concatenate.2 = bf16[576,2048]{1,0:T(8,128)(2,1)S(1)} concatenate(%collective-permute-done.2, %fusion.106), dimensions={0}
}
"""  # noqa: E501


def test_the_padding_of_a_reduce_scatter_is_not_counted_but_the_ppermutes_that_it_needs_are():
    """With padding the four shards of 2112 rows start up to 48 rows late; a ppermute corrects that."""
    assert tally(communication_in_hlo(REDUCE_SCATTER, SIZES)) == {
        (Operation.reduce_scatter, DP, "bfloat16", 2 * 2048 * 2048): 1,
        (Operation.ppermute, DP, "bfloat16", 2 * 48 * 2048): 1,
    }


LOOP = """
%start (param_0.178: bf16[1,2048,512]) -> (bf16[1,2048,512], bf16[1,2048,2048]) {
  %param_0.178 = bf16[1,2048,512]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.28 = bf16[1,2048,2048]{2,1,0:T(8,128)(2,1)} all-gather(%param_0.178), channel_id=3, replica_groups={{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}, dimensions={2}, frontend_attributes={chain_id="0"}, metadata={op_name="jit(loss)/shard_map/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/all_gather"}
  ROOT %custom-call.2 = (bf16[1,2048,512]{2,1,0}, bf16[1,2048,2048]{2,1,0}) custom-call(%all-gather.28), custom_call_target="AsyncCollectiveStart"
}

%meanwhile (param_0.182: bf16[1,2048,512]) -> bf16[1,2048,2048] {
  %param_0.182 = bf16[1,2048,512]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %all-gather.30 = bf16[1,2048,2048]{2,1,0:T(8,128)(2,1)S(1)} all-gather(%param_0.182), channel_id=3, replica_groups={{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}, dimensions={2}, frontend_attributes={chain_id="0"}
}

%body (p: (s32[], bf16[1,2048,512])) -> (s32[], bf16[1,2048,512]) {
  %constant.1 = s32[]{:T(128)} constant(STEP)
  %p = (s32[]{:T(128)}, bf16[1,2048,512]{2,1,0}) parameter(0)
  %x = bf16[1,2048,512]{2,1,0} get-tuple-element(%p), index=1
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %copy.18 = s32[]{:T(128)S(6)} copy(%i)
  %add.1 = s32[]{:T(128)} add(%copy.18, %constant.1)
  %async-collective-start = (bf16[1,2048,512]{2,1,0}, bf16[1,2048,2048]{2,1,0}) fusion(%x), kind=kCustom, calls=%start
  %fusion.109 = bf16[1,2048,2048]{2,1,0} fusion(%x), kind=kCustom, calls=%meanwhile
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[1,2048,512]{2,1,0}) tuple(%add.1, %x)
}

%condition (p.1: (s32[], bf16[1,2048,512])) -> pred[] {
  %constant.516 = s32[]{:T(128)} constant(8)
  %p.1 = (s32[]{:T(128)}, bf16[1,2048,512]{2,1,0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %lt.136 = pred[]{:T(512)} compare(%i.1, %constant.516), direction=LT
}

ENTRY %main (x.1: bf16[1,2048,512]) -> (s32[], bf16[1,2048,512]) {
  %x.1 = bf16[1,2048,512]{2,1,0} parameter(0)
  %constant.545 = s32[]{:T(128)} constant(0)
  %copy.379 = s32[]{:T(128)} copy(%constant.545)
  %tuple.216 = (s32[]{:T(128)}, bf16[1,2048,512]{2,1,0}) tuple(%copy.379, %x.1)
  ROOT %while.277 = (s32[]{:T(128)}, bf16[1,2048,512]{2,1,0}) while(%tuple.216), condition=%condition, body=%body
}
"""  # noqa: E501


@pytest.mark.parametrize(("step", "times"), [(1, 8), (2, 4), (3, 3)])
def test_a_collective_in_a_loop_is_counted_once_per_iteration(step, times):
    """A gather that several fusions carry along is one gather."""
    (gather,) = communication_in_hlo(LOOP.replace("STEP", str(step)), SIZES)
    assert (gather.operation, gather.axis, gather.dtype, gather.bytes) == (
        Operation.all_gather,
        DP,
        "bfloat16",
        2 * 2048 * 512,
    )
    assert gather.count == times and gather.direction == Direction.recompute


def test_a_collective_in_a_loop_of_unknown_length_or_in_a_branch_is_rejected():
    branch = one_collective(f"replica_groups={{{ROWS}}}").replace("ENTRY %main", "%branch")
    entry = """
ENTRY %main (i: s32[], x: f32[8,16]) -> f32[8,16] {
  %i = s32[] parameter(0)
  %x = f32[8,16]{1,0} parameter(1)
  ROOT %either = f32[8,16]{1,0} conditional(%i, %x, %x), branch_computations={%branch, %branch}
}
"""
    for text, where in (
        (LOOP.replace("constant(STEP)", "parameter(1)"), r"all-gather\.28 runs, in start"),
        (branch + entry, "collective runs, in branch"),
    ):
        with pytest.raises(ValueError, match=f"it is unknown how often {where}"):
            communication_in_hlo(text, SIZES)


# As traced


def test_a_trace_with_a_collective_in_a_while_loop_or_an_unknown_one_is_rejected():
    def over(body):
        return jax.make_jaxpr(jax.shard_map(body, mesh=mesh((2, 4)), in_specs=P(MP), out_specs=P()))(jnp.ones(4)).jaxpr

    def unknown(x):
        return lax.while_loop(lambda x: x[0] < 9, lambda x: lax.psum(mark_varying(x, MP), MP), lax.psum(x, MP))

    with pytest.raises(ValueError, match="it is unknown how often this runs: all-reduce over mp in a while"):
        communication_in_jaxpr(over(unknown))
    with pytest.raises(ValueError, match="unknown collective"):
        communication_in_jaxpr(over(lambda x: lax.pmin(x, MP)))


def test_a_named_grid_may_renumber_its_positions():
    """As in the GSPMD baseline for a v3-32 on (4, 8): 4 x 8 devices in column-major order."""
    text = "replica_groups=mesh['axis_0'=8,'axis_1'=1,'axis_2'=4], device_ids=([4,8]T(1,0)) {'axis_0'}, use_global"
    assert replica_groups(text, 32) == {frozenset(range(8 * row, 8 * row + 8)) for row in range(4)}
    text = "replica_groups=mesh['axis_0'=8,'axis_1'=4], device_ids=([4,8]T(1,0)) {'axis_1'}"
    assert replica_groups(text, 32) == {frozenset(range(column, 32, 8)) for column in range(8)}
