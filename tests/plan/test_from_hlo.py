"""Collectives read from compiled modules: operation, axis, size and count; none is missed.

The TPU texts are excerpts of modules that libtpu 0.0.42 makes for a v5e 4x4 as a (4, 4) mesh, most attributes omitted.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from shmap_tp.parallel.collectives import mark_varying
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.plan.communication.from_hlo import CompiledCollective, communication_in_hlo, replica_groups
from shmap_tp.plan.communication.from_jaxpr import communication_in_jaxpr
from shmap_tp.plan.communication.ledger import Direction, Entry, Operation, key
from shmap_tp.plan.communication.reconcile import reconcile
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
    planned = communication_in_jaxpr(jax.make_jaxpr(run)(x).jaxpr)
    assert {entry.operation for entry in planned} == set(Operation) - {Operation.all_to_all}  # which no program plans
    assert {(entry.axis, entry.count) for entry in planned} == {(DP, 3), (MP, 3), (f"{DP} {MP}", 3), (f"{DP} {MP}", 1)}
    sizes = dict(mesh.shape)
    found = reconcile(planned, communication_in_hlo(run.lower(x).compile().as_text(), sizes), sizes)
    assert found.balanced, str(found)


def test_an_all_reduce_in_place_of_a_reduce_scatter_is_no_fault_but_costs_more():
    planned = Entry("gradient", Operation.reduce_scatter, DP, "float32", 64, 2, Direction.backward)
    whole = replace(planned, operation=Operation.all_reduce, what="all-reduce.1")
    done = CompiledCollective("all-reduce.1", (whole,))
    found = reconcile([planned], [done], SIZES)
    assert found.summed == [planned] and not found.balanced
    first, line, _, meaning = found.report.splitlines()
    assert first.startswith("the planned result at a higher cost")
    assert line == "COSTLIER: gradient, reduce-scatter over dp, float32, 64 bytes x 2" and "twice the bytes" in meaning
    once = CompiledCollective("all-reduce.1", (replace(whole, count=1),))
    assert reconcile([planned], [once], SIZES).report.startswith("NOT as planned")
    nowhere = CompiledCollective("all-reduce.1", (replace(whole, axis="[[0, 5], [1, 4]]"),))
    assert reconcile([planned], [nowhere], SIZES).unplanned == list(nowhere.entries)


def test_an_all_reduce_is_no_all_gather_where_a_reduce_scatter_of_its_array_is_missing():
    """The gather of the same weight may have been saved, and is then what is reported; both arrays of an all-reduce
    are named after it."""
    scatter = Entry("gradient", Operation.reduce_scatter, DP, "float32", 64, 2, Direction.backward)
    gather = Entry("weight", Operation.all_gather, DP, "float32", 16, 2, Direction.forward)
    whole = replace(scatter, operation=Operation.all_reduce, what="all-reduce.1", count=1)
    found = reconcile([gather, scatter], [CompiledCollective("all-reduce.1", (whole, whole))], SIZES)
    assert found.summed == [scatter] and found.missing == [gather] and not found.unplanned
    assert found.merges == {"all-reduce.1": ["gradient"]}


def test_a_collective_that_the_compiler_saves_is_no_fault_where_the_result_is_the_same():
    """The gather of a tied, frozen embedding serves lookup and head; scalars are added up before they are reduced."""
    gather = Entry("embedding", Operation.all_gather, DP, "bfloat16", 4096, 1, Direction.forward)
    norm = Entry("gradient norm", Operation.all_reduce, DP, "float32", 4, 1, Direction.once)
    found = [CompiledCollective(entry.what, (entry,)) for entry in (gather, norm)]
    report = reconcile([gather, gather, norm, norm], found, SIZES)
    assert report.balanced and report.shared == [gather, norm]
    large = replace(norm, bytes=4096)
    assert reconcile([large, large], [CompiledCollective("one", (large,))], SIZES).missing == [large]
    other = replace(gather, what="head")
    assert reconcile([gather, other], found[:1], SIZES).missing and reconcile([norm], [], SIZES).missing == [norm]


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
    ((entry,),) = [one.entries for one in communication_in_hlo(one_collective(f"replica_groups={groups}"), SIZES)]
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


def test_the_ppermute_of_a_padded_reduce_scatter_belongs_to_it():
    """With padding the four shards of 2112 rows start up to 48 rows late; a ppermute corrects that."""
    planned = Entry("dw", Operation.reduce_scatter, DP, "bfloat16", 2 * 2048 * 2048, 1, Direction.once)
    found = reconcile([planned], communication_in_hlo(REDUCE_SCATTER, SIZES), SIZES)
    assert found.balanced, str(found)
    assert [key(entry) for entry in found.padding_exchanges] == [(Operation.ppermute, DP, "bfloat16", 2 * 48 * 2048)]
    assert reconcile([], communication_in_hlo(REDUCE_SCATTER.replace("pad(", "copy("), SIZES), SIZES).unplanned


def test_padding_of_more_than_a_shard_is_corrected_by_ppermutes_of_shards_and_of_the_rest():
    """16 shards of 7 rows each are padded to 10: the last one starts 45 rows late, which are 4 shards and 5 rows.  From
    four devices before it a row of mp = 4 is passed over dp."""
    planned = Entry("dw", Operation.reduce_scatter, f"{DP} {MP}", "bfloat16", 16 * 7 * 64, 1, Direction.once)
    done = CompiledCollective("scatter", (replace(planned, what="scatter"),), padding=16 * 3 * 64)

    def passed(name: str, axes: str, size: int) -> CompiledCollective:
        exchange = replace(planned, what=name, operation=Operation.ppermute, axis=axes, bytes=size)
        return CompiledCollective(name, (exchange,))

    pieces = [passed(str(by), DP if by == 4 else f"{DP} {MP}", 10 * 64) for by in range(1, 5)]
    pieces.append(passed("5", f"{DP} {MP}", 5 * 64))
    found = reconcile([planned], [done, *pieces], SIZES)
    assert found.balanced and sum(entry.count for entry in found.padding_exchanges) == 5, str(found)
    for wrong in (
        [*pieces, passed("6", f"{DP} {MP}", 5 * 64)],
        [*pieces[:-1], passed("5", "ep", 5 * 64)],
        [*pieces[:-1], passed("5", DP, 64)],
    ):
        assert reconcile([planned], [done, *wrong], SIZES | {"ep": 2}).unplanned


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
    ((gather,),) = [collective.entries for collective in communication_in_hlo(LOOP.replace("STEP", str(step)), SIZES)]
    assert key(gather) == (Operation.all_gather, DP, "bfloat16", 2 * 2048 * 512)
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


def test_arrays_of_a_loop_may_be_communicated_stacked_after_it():
    """A key/value weight's gradient in each of 4 layers: on TPU all 4 together, and not fewer."""

    def entry(size: int, count: int) -> Entry:
        return Entry("dw", Operation.all_reduce, MP, "float32", size, count, Direction.backward)

    found = communication_in_hlo(one_collective(f"replica_groups={{{ROWS}}}"), SIZES)
    assert reconcile([entry(128, 4)], found, SIZES).balanced
    assert [e.what for e in reconcile([entry(128, 4)], found, SIZES).stacked] == ["collective"]
    assert reconcile([entry(128, 5)], found, SIZES).missing == [entry(128, 1)]
    assert [e.bytes for e in reconcile([entry(128, 3)], found, SIZES).unplanned] == [512]
    assert not reconcile([entry(256, 1)], found, SIZES).balanced
    assert not reconcile([entry(192, 2)], found, SIZES).balanced


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
