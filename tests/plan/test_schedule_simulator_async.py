"""Simulated schedules of asynchronous collectives as XLA for TPU prints them.

The lines are excerpts of modules of benchmarks/benchmark_layerwise.py for a v4 2x2x1, without flags, layouts and
metadata.
"""

import pytest

from shmap_tp.hardware.devices import DEVICES, GENERATIONS
from shmap_tp.plan.compiled_communication import replica_groups
from shmap_tp.plan.hlo_parser import parse_hlo
from shmap_tp.plan.schedule_simulator import simulate
from shmap_tp.plan.tpu import HOP_LATENCY, LinkModel

RING = [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0]]
LINK_MODEL = LinkModel.of(GENERATIONS["v4"], RING)
GATHER = 2 * 16384**2 * 3 / 4 / (2 * 4.5e10) + 2 * HOP_LATENCY
"""Seconds of an all-gather to bf16[16384,16384] over two links."""
MATMUL_CYCLES = 8986244
"""Cycles of a matmul with the result."""


def seconds(cycles: float) -> float:
    return cycles / DEVICES["TPU v4"].clock


CHAIN = """
%fused_computation.12 (param_0.18: bf16[4096,16384]) -> (bf16[4096,16384], bf16[16384,16384], s32[2]) {
  %param_0.18 = bf16[4096,16384] parameter(0)
  %all-gather.27 = bf16[16384,16384] all-gather(%param_0.18), channel_id=4, replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="1"}
  ROOT %custom-call.5 = (bf16[4096,16384], bf16[16384,16384], s32[2]) custom-call(%all-gather.27), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.21 (param_0.22: bf16[4096,16384], param_1.14: bf16[16384,16384], param_2.7: s32[2], param_16.6: bf16[16384,16384], param_17.7: bf16[4096,16384]) -> (bf16[4096,16384], bf16[4096,16384], bf16[16384,16384], bf16[16384,16384], s32[2]) {
  %param_0.22 = bf16[4096,16384] parameter(0)
  %param_1.14 = bf16[16384,16384] parameter(1)
  %param_2.7 = s32[2] parameter(2)
  %param_16.6 = bf16[16384,16384] parameter(3)
  %param_17.7 = bf16[4096,16384] parameter(4)
  %convolution.8 = bf16[4096,16384] convolution(%param_17.7, %param_16.6), dim_labels=bf_io->bf
  %all-gather.29 = bf16[16384,16384] all-gather(%param_0.22), channel_id=4, replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="1"}
  ROOT %tuple.8 = (bf16[4096,16384], bf16[4096,16384], bf16[16384,16384], bf16[16384,16384], s32[2]) tuple(%convolution.8, %param_0.22, %param_1.14, %all-gather.29, %param_2.7)
}

%fused_computation.14 (param_0.24: bf16[4096,16384], param_1.15: bf16[16384,16384], param_2.9: s32[2]) -> bf16[16384,16384] {
  %param_0.24 = bf16[4096,16384] parameter(0)
  %param_1.15 = bf16[16384,16384] parameter(1)
  %param_2.9 = s32[2] parameter(2)
  %all-gather.31 = bf16[16384,16384] all-gather(%param_0.24), channel_id=4, replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="1"}
  ROOT %custom-call.7 = bf16[16384,16384] custom-call(%param_0.24, %param_1.15, %all-gather.31, %param_2.9), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main.0_spmd (param.2: bf16[4096,16384], param.3: bf16[4096,16384], param.4: bf16[16384,16384]) -> bf16[16384,16384] {
  %param.2 = bf16[4096,16384] parameter(0)
  %param.3 = bf16[4096,16384] parameter(1)
  %param.4 = bf16[16384,16384] parameter(2)
  %async-collective-start.1 = (bf16[4096,16384], bf16[16384,16384], s32[2]) fusion(%param.3), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%fused_computation.12
  %get-tuple-element.42 = s32[2] get-tuple-element(%async-collective-start.1), index=2
  %get-tuple-element.41 = bf16[16384,16384] get-tuple-element(%async-collective-start.1), index=1
  %get-tuple-element.40 = bf16[4096,16384] get-tuple-element(%async-collective-start.1), index=0
  %fusion.21 = (bf16[4096,16384], bf16[4096,16384], bf16[16384,16384], bf16[16384,16384], s32[2]) fusion(%get-tuple-element.40, %get-tuple-element.41, %get-tuple-element.42, %param.4, %param.2), kind=kOutput, calls=%async_collective_fusion.21, backend_config={"window_config":{"estimated_cycles":"8986244"}}
  %get-tuple-element.60 = s32[2] get-tuple-element(%fusion.21), index=4
  %get-tuple-element.58 = bf16[16384,16384] get-tuple-element(%fusion.21), index=2
  %get-tuple-element.57 = bf16[4096,16384] get-tuple-element(%fusion.21), index=1
  ROOT %async-collective-done.1 = bf16[16384,16384] fusion(%get-tuple-element.57, %get-tuple-element.58, %get-tuple-element.60), kind=kCustom, output_to_operand_aliasing={{}: (1, {})}, calls=%fused_computation.14
}
"""  # noqa: E501


@pytest.mark.parametrize("cycles", [MATMUL_CYCLES, 1_000_000])
def test_a_fusion_overlaps_the_collective_that_it_carries_along(cycles):
    found = simulate(parse_hlo(CHAIN.replace(str(MATMUL_CYCLES), str(cycles))), LINK_MODEL)
    assert found.comm_seconds == pytest.approx(GATHER)
    assert found.seconds == pytest.approx(max(GATHER, seconds(cycles)))
    assert found.exposed_comm_seconds == pytest.approx(max(0.0, GATHER - seconds(cycles)))


START = """
ENTRY %main.0_spmd (param.6: bf16[4096,16384], param.5: bf16[4096,16384]) -> bf16[16384,16384] {
  %param.6 = bf16[4096,16384] parameter(0)
  %param.5 = bf16[4096,16384] parameter(1)
"""


def permutes(pairs: str) -> str:
    """Two ppermutes in flight: one up the ring, one by `pairs`."""
    one = "(bf16[4096,16384], bf16[4096,16384], u32[], u32[]) collective-permute-start"
    done = "bf16[4096,16384] collective-permute-done"
    return f"""{START}\
  %collective-permute-start = {one}(%param.6), channel_id=2, source_target_pairs={{{{0,1}},{{1,2}},{{2,3}},{{3,0}}}}
  %collective-permute-start.4 = {one}(%param.5), channel_id=3, source_target_pairs={{{pairs}}}
  %collective-permute-done = {done}(%collective-permute-start)
  ROOT %collective-permute-done.4 = {done}(%collective-permute-start.4)
}}
"""


@pytest.mark.parametrize(
    ("pairs", "hops"),
    [
        pytest.param("{0,3},{1,0},{2,1},{3,2}", 1, id="the other direction: concurrent"),
        pytest.param("{0,1},{1,2},{2,3},{3,0}", 2, id="the same direction: one after the other"),
        pytest.param("{0,2},{1,3},{2,0},{3,1}", 3, id="two hops, over busy links: one after the other"),
    ],
)
def test_ppermutes_conflict_only_if_they_use_the_same_links(pairs, hops):
    found = simulate(parse_hlo(permutes(pairs)), LINK_MODEL)
    assert found.seconds == pytest.approx(hops * (2 * 4096 * 16384 / 4.5e10 + HOP_LATENCY))


def test_replica_groups_may_name_axes_of_a_grid():
    attributes = "channel_id=9, replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, dimensions={1}"
    assert replica_groups(attributes, 8) == {frozenset({0, 2, 4, 6}), frozenset({1, 3, 5, 7})}
