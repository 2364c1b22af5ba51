"""Simulated schedules with copies, transfers to host memory, SparseCore lookups, and transfers between slices."""

import re

import pytest

from shmap_tp.hardware.devices import GENERATIONS
from tests.helpers.hlo_text import (
    ALL_GATHER,
    BYTES,
    LINK_MODEL,
    MEMORY_RATE,
    US,
    X,
    about,
    done,
    fusion,
    gather_start,
    run,
)  # fmt: skip

HOST_RATE = GENERATIONS["v5e"].host_rate


def copy_start(name: str) -> str:
    return f"%{name} = ({X}, {X}, u32[]{{:S(2)}}) copy-start(%x)"


def test_copies_overlap_compute_and_collectives_but_not_each_other():
    """They are not communication."""
    once = BYTES / MEMORY_RATE
    overlapped = run(f"{copy_start('c')}\n{fusion('f', 2 * once)}\n{done('c', 'copy-done')}")
    assert overlapped.scopes == {"mlp": about(2 * once), "waiting for copies": 0}
    starts = f"{copy_start('c')}\n{copy_start('d')}\n{gather_start('s')}"
    found = run(f"{starts}\n{done('c', 'copy-done')}\n{done('d', 'copy-done')}")
    assert found.scopes["waiting for copies"] == found.seconds == about(2 * once)
    assert found.exposed_comm_seconds == 0 and found.comm_seconds == pytest.approx(ALL_GATHER)


def test_host_writes_and_reads_overlap_everything_but_their_own_direction():
    once = 2 * 16 * 4096 / HOST_RATE
    stack, part = "bf16[8,16,4096]{2,1,0:T(8,128)(2,1)S(5)}", "bf16[1,16,4096]{2,1,0:T(8,128)(2,1)}"

    def write(name: str) -> str:
        return f"%{name} = (({stack}, {part}, s32[]), {stack}, u32[]{{:S(2)}}) dynamic-update-slice-start(%x)"

    def read(name: str) -> str:
        return f"%{name} = (({stack}, s32[]), {part}, u32[]{{:S(2)}}) dynamic-slice-start(%x)"

    starts = f"{write('w')}\n{read('r')}\n{copy_start('c')}\n{fusion('f', once / 2)}"
    waits = f"{done('w', 'dynamic-update-slice-done')}\n{done('r', 'dynamic-slice-done')}"
    found = run(f"{starts}\n{waits}")
    assert found.seconds == about(once) and found.comm_seconds == 0
    assert found.scopes == {
        "mlp": about(once / 2),
        "waiting for the host, writes": about(once / 2),
        "waiting for the host, reads": about(0),
    }
    assert run(f"{write('w')}\n{write('v')}\n{done('v', 'dynamic-update-slice-done')}").seconds == about(2 * once)
    assert run(f"{read('r')}\n{read('q')}\n{done('q', 'dynamic-slice-done')}").seconds == about(2 * once)


@pytest.mark.parametrize(
    ("result", "source", "channel"),
    [("S(5)", "", "the host, writes"), ("", "S(5)", "the host, reads"), ("S(1)", "", "copies")],
)
def test_the_memory_space_of_its_result_determines_the_channel_of_a_copy(result, source, channel):
    to, of = (f"bf16[16,4096]{{1,0:T(8,128)(2,1){space}}}" for space in (result, source))
    found = run(f"%c = ({to}, {of}, u32[]) copy-start(%x)\n{done('c', 'copy-done')}")
    assert found.scopes == {f"waiting for {channel}": found.seconds}


def test_only_the_sliced_part_of_an_array_is_copied():
    part = "bf16[16,4096]{1,0}"
    found = run(f"%s = (({X}), {part}, s32[]) slice-start(%x)\n%s.done = {part} slice-done(%s)")
    assert found.seconds == pytest.approx(2 * 16 * 4096 / MEMORY_RATE)


def test_a_lookup_by_the_sparse_cores_is_awaited_but_is_not_communication():
    called = "\n%lookup (a: bf16[]) -> bf16[] {\n  %a = bf16[] parameter(0)\n" + (
        '  ROOT %g = bf16[] fusion(%a), calls=%add, backend_config={"estimated_cycles":"9223372036854775807"}\n}\n'
    )
    entry = f"""
    %s = (({X}), bf16[64,4096]{{1,0}}, u32[]{{:S(8)}}) call-start(%x), to_apply=%lookup
    {fusion("f", US)}
    %d = bf16[64,4096]{{1,0}} call-done(%s)
    """
    accessed = sum(2 * rows * 4096 for rows in (2048, 2048, 64)) + 4
    found = run(entry, called)
    assert found.seconds == about(accessed / MEMORY_RATE) and found.comm_seconds == 0
    assert found.scopes["waiting for sparse cores"] == about(accessed / MEMORY_RATE - US)


def test_a_fusion_on_another_stream_is_counted_where_it_starts():
    """As XLA for GPU writes it since jax 0.12; its end is not awaited again."""
    cost = '{"estimated_cycles":"940"}'
    start = f"%s = (({X}), {X}) fusion-start(%x), calls=%add, backend_config={cost}"
    found, alone = run(f"{start}\n%d = {X} fusion-done(%s)"), run(start)
    assert found.seconds == alone.seconds > 0 and found.comm_seconds == 0


def send_and_recv(slices: str, size: int = 65536, number: int = 0) -> str:
    """An all-reduce between slices, as XLA prints it."""
    state = f"(f32[{size},8,128]{{2,1,0:T(8,128)}}, u32[], token[])"
    attributes = (
        f'frontend_attributes={{_xla_host_transfer_rendezvous="psum.{number}",'
        f'_xla_megascale_target="{{{slices}}}x{{0:3}}",_xla_megascale_transfer_type="ALL_REDUCE"}}'
    )
    return f"""
    %send.{number} = {state} send(%x, %token), channel_id=14, is_host_transfer=true, {attributes}
    %recv.{number} = {state} recv(%token), channel_id=13, is_host_transfer=true, {attributes}
    """


SEND_AND_RECV_DONE = """
%send-done.0 = token[] send-done(%send.0), channel_id=14
%recv-done.0 = (f32[65536,8,128]{2,1,0}, token[]) recv-done(%recv.0), channel_id=13
"""


@pytest.mark.parametrize("slices", ["1,2", "1,2,3,4", ",".join(map(str, range(1, 33)))])
def test_a_send_and_recv_between_slices_take_the_network_time_once(slices):
    count = len(slices.split(","))
    once = LINK_MODEL.inter_slice_seconds("all-reduce", 4.0 * 65536 * 8 * 128 + 4, count)
    assert once > 4 * 65536 * 8 * 128 * 2 * (count - 1) / count / 6.25e9
    found = run(send_and_recv(slices) + SEND_AND_RECV_DONE)
    assert found.seconds == found.comm_seconds == found.exposed_comm_seconds == pytest.approx(once)
    with_gather = run(send_and_recv(slices) + gather_start("s") + "\n" + done("s") + SEND_AND_RECV_DONE)
    assert with_gather.comm_seconds == pytest.approx(once + ALL_GATHER)
    assert with_gather.seconds == with_gather.exposed_comm_seconds == about(once), "the network is not the links"


def test_a_gather_between_slices_sends_one_shard_and_receives_those_of_all_others():
    count, shard = 4, 4.0 * 65536 * 8 * 128
    found = run(send_and_recv("1,2,3,4").replace("ALL_REDUCE", "ALL_GATHER") + SEND_AND_RECV_DONE)
    assert found.seconds == pytest.approx((count - 1) * shard / 6.25e9, rel=1e-3)


def test_a_send_without_a_number_of_slices_is_rejected():
    with pytest.raises(ValueError, match=r"send\.0: the number of slices that communicate cannot be read"):
        run(re.sub("_xla_megascale_target=[^,]*,2}", "_target=", send_and_recv("1,2")))
