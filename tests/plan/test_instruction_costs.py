"""The time of compute instructions: the compiler's estimate, the FLOPs of kernels, or bytes accessed."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shmap_tp.hardware.devices import DEVICES
from shmap_tp.layers.grouped_matmul import in_kernels
from shmap_tp.plan.hlo_parser import parse_hlo
from shmap_tp.plan.tpu import Slice, topology_devices
from shmap_tp.plan.tpu_instructions import (
    GROUPED_EFFICIENCY,
    GROUPED_EFFICIENCY_EIGHT_BIT,
    KERNEL_EFFICIENCY,
    grouped_tiles,
    kernel_flops,
    kernel_seconds,
)
from tests.helpers.hlo_text import BYTES, MEMORY_RATE, US, X, module_text, run


def test_estimated_cycles_are_divided_by_the_clock():
    found = run('%f = f32[8]{0} fusion(%x), kind=kLoop, calls=%add, backend_config={"estimated_cycles":"1503"}')
    assert found.seconds == pytest.approx(US)
    assert found.comm_seconds == found.exposed_comm_seconds == found.unestimated_bytes == 0


def test_an_instruction_without_an_estimate_takes_the_time_of_its_memory_accesses():
    found = run(f"%y = {X} multiply(%x, %x)")
    assert found.unestimated_bytes == 3 * BYTES
    assert found.seconds == pytest.approx(3 * BYTES / MEMORY_RATE)


PART, INDEX = "bf16[16,4096]{1,0}", 4.0
PART_BYTES = 2.0 * 16 * 4096
IN_PLACE = {
    f"{X} dynamic-update-slice(%x, %part, %i)": 2 * (PART_BYTES + INDEX),
    f"{PART} scatter(%part, %i, %x), to_apply=%add": 2 * (BYTES + INDEX),
    f"{X} fusion(%part, %i), kind=kLoop, calls=%add": PART_BYTES + INDEX + BYTES,
}
"""An update of a part; a scatter of more rows than the array has; a scatter into an array that it makes."""


@pytest.mark.parametrize("instruction", IN_PLACE)
def test_an_update_in_place_accesses_what_it_changes_and_no_more(instruction):
    found = run(f"""
        %i = s32[] parameter(1)
        %part = {PART} parameter(2)
        %scatter.1 = {instruction}
        """)
    assert found.unestimated_bytes == IN_PLACE[instruction]


def test_bookkeeping_instructions_and_annotations_take_no_time():
    found = run(f"""
        %c = s32[] constant(0)
        %t = ({X}, s32[]) tuple(%x, %c)
        %g = {X} get-tuple-element(%t), index=0
        %b = bf16[8388608]{{0}} bitcast(%g)
        %a = {X} custom-call(), custom_call_target="AllocateBuffer"
        %p = u32[] partition-id()
        """)
    assert found.seconds == 0


def test_a_kernel_takes_the_time_of_its_declared_flops_or_bytes():
    kernel = f'%k = {X} custom-call(%x), custom_call_target="tpu_custom_call"'
    config = ', backend_config={"custom_call_config":{"cost_estimate":{"flops":"197000000","bytes_accessed":"%d"}}}'
    assert run(kernel + config % 1).seconds == pytest.approx(US / KERNEL_EFFICIENCY)
    assert run(kernel + config % (3 * MEMORY_RATE)).seconds == pytest.approx(3)
    with pytest.raises(ValueError, match="k: a kernel that does not declare its FLOPs"):
        run(kernel)


def splash(phase: str, block: tuple[int, int], q: str, out: str) -> str:
    """A kernel of splash attention as XLA for TPU prints it, over three lines."""
    suffix, residuals = ("", "residuals") if phase == "fwd" else (f"_{phase}", "no_residuals")
    name = f"splash_mqa_{phase}_{residuals}"
    metadata = f'{{\\"block_q{suffix}\\": {block[0]}, \\"block_kv{suffix}\\": {block[1]}, \\"q_layout\\": 1}}'
    return (
        f'%{name}.1 = {out} custom-call(%x, %x), custom_call_target="tpu_custom_call", '
        f"operand_layout_constraints={{s8[1,4,4]{{2,1,0}}, {q}{{3,2,1,0}}, bf16[8,2048,256]{{2,1,0}}, s32[2048,128]}}, "
        f'frontend_attributes={{kernel_metadata={{\n"xprof_metadata":"{metadata}"\n}}}}, '
        f'metadata={{op_name="jit(step)/jvp(blocks)/attention/attend/{name}/pallas_call"}}, '
        f'backend_config={{"flag_configs":[],"custom_call_config":{{"body":"TUzv"}}}}'
    )


DQ, DK = "bf16[8,1,2048,256]", "bf16[8,2048,256]"
SPLASH = {
    "forward": ("fwd", (512, 512), DQ, 10 * 512 * 512 * 2),
    "forward, one block": ("fwd", (2048, 2048), DQ, 2048 * 2048 * 2),
    "forward, wide blocks": ("fwd", (512, 1024), DQ, 6 * 512 * 1024 * 2),
    "forward, high blocks": ("fwd", (1024, 512), DQ, 6 * 512 * 1024 * 2),
    "backward": ("dkv", (512, 512), f"(f32[8,512,256], f32[8,512,256], {DK}, {DK})", 10 * 512 * 512 * 4),
    "backward with dq": ("dkv", (512, 512), f"(f32[8,512,256], bf16[8,4,1,2048,256], {DK}, {DK})", 10 * 512 * 512 * 5),
    "dq": ("dq", (512, 512), f"(f32[8,512,256], {DQ})", 10 * 512 * 512 * 3),
}


@pytest.mark.parametrize("case", SPLASH)
def test_splash_attention_takes_the_flops_of_the_blocks_that_it_computes(case):
    """8 heads of 256 and 2048 positions: of 16 blocks of 512, the 10 that the causal mask does not rule out."""
    phase, block, out, values = SPLASH[case]
    found = run(splash(phase, block, "bf16[8,1,2048,256]", out))
    flops = 8 * 2 * 256 * values
    assert found.seconds == pytest.approx(flops / (KERNEL_EFFICIENCY * DEVICES["TPU v5 lite"].flops))
    assert found.scopes.keys() == {"attention"}, "attributes after the kernel's metadata are read"


def test_splash_attention_in_a_window_computes_the_blocks_that_it_reaches():
    """In a window of 512 or 513 positions a block of queries sees its own block of keys and the one before, in one of
    514 also the one before that."""
    for window, blocks in ((512, 7), (513, 7), (514, 9)):
        kernel = splash("dkv", (512, 512), "bf16[8,1,2048,256]", SPLASH["backward"][2])
        found = run(kernel.replace("/attend/", f"/attend_window_{window}/"))
        flops = 8 * 2 * 256 * blocks * 512 * 512 * 4
        assert found.seconds == pytest.approx(flops / (KERNEL_EFFICIENCY * DEVICES["TPU v5 lite"].flops))


def test_splash_attention_of_chunks_behind_as_many_keys_computes_the_blocks_that_the_window_reaches():
    """Each of the 2 blocks of 1024 queries behind 1024 keys sees its own block of keys and the one before."""
    kernel = splash("dkv", (512, 512), "bf16[8,1,1024,256]", SPLASH["backward"][2])
    found = run(kernel.replace("/attend/", "/attend_window_512_of_chunks/"))
    flops = 8 * 2 * 256 * 4 * 512 * 512 * 4
    assert found.seconds == pytest.approx(flops / (KERNEL_EFFICIENCY * DEVICES["TPU v5 lite"].flops))


def test_splash_attention_with_unknown_blocks_is_rejected():
    kernel = splash("fwd", (512, 512), DQ, DQ)
    for old, new in {"block_kv": "block_k", "bf16[8,1,2048,256]{3": "s8[8,1,2048,256]{3"}.items():
        with pytest.raises(ValueError, match=r"splash_mqa_fwd_residuals\.1: the block sizes and the shapes of q and k"):
            run(kernel.replace(old, new).replace("bf16[8,2048,256]{2", "s8[8,2048,256]{2"))


def grouped(kernel: str, operands: str, flops: float, size: float) -> str:
    """A kernel of grouped matmuls as XLA for TPU prints it: 8 groups, 64 tiles of rows."""
    return (
        f'%{kernel}.1 = {X} custom-call(%x, %x), custom_call_target="tpu_custom_call", '
        f"operand_layout_constraints={{s32[], s32[9]{{0}}, s32[71]{{0}}, s32[71]{{0}}, s32[1]{{0}}, {operands}}}, "
        f"frontend_attributes={{kernel_metadata={{}}}}, "
        f'metadata={{op_name="jit(step)/jvp(blocks)/mlp/jit({kernel})/pallas_call"}}, '
        f'backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":"{flops:.0f}",'
        f'"transcendentals":"0","bytes_accessed":"{size:.0f}"}}}}}}'
    )


FLOPS = 2 * 65536 * 2944 * 2304
MATRIX = 2944 * 768 * 2
GROUPED = {
    # kernel, operands, features of tiles relative to those of the matrix, bytes declared and not read
    "gmm": ("gmm", "bf16[65536,2944]{1,0}, bf16[8,2944,2304]{2,1,0}", 3072 / 2944, 0),
    "gmm, transposed, a matrix read once": (
        "gmm", "bf16[65536,768]{1,0}, bf16[8,2944,768]{2,1,0}", 3072 / 2944, (71 - 8) * MATRIX,
    ),
    "gmm, all features of float32 in one tile": (
        "gmm", "f32[65536,768]{1,0}, f32[8,768,2944]{2,1,0}", 3072 / 2944, (71 - 8) * MATRIX * 2,
    ),
    "gmm, the sum of two products": (
        "gmm", "bf16[65536,768]{1,0}, bf16[65536,768]{1,0}, bf16[8,2944,768]{2,1,0}, bf16[8,2944,768]{2,1,0}",
        3072 / 2944, 2 * (71 - 8) * MATRIX,
    ),
    "gmm of int8, with a scale for each row": (
        "gmm", "s8[65536,768]{1,0}, s8[8,2944,768]{2,1,0}, f32[65536,1]{1,0}", 3072 / 2944, (71 - 8) * MATRIX // 2,
    ),
    "tgmm": ("tgmm", "bf16[65536,2944]{1,0}, bf16[65536,768]{1,0}", 3072 / 2944, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPED)
def test_a_grouped_matmul_takes_the_flops_of_its_tiles_or_the_bytes_that_it_reads(case):
    """A matrix of 2944 features has tiles of 512 or 1024; of 8 groups 7 end within a tile."""
    kernel, operands, exceeding, not_read = GROUPED[case]
    found = run(grouped(kernel, operands, FLOPS, 1e9))
    rate = GROUPED_EFFICIENCY * DEVICES["TPU v5 lite"].flops
    rate = GROUPED_EFFICIENCY_EIGHT_BIT * 393e12 if "s8" in operands else rate
    assert found.seconds == pytest.approx(FLOPS * exceeding * (64 + 7) / 64 / rate)
    size = 1e12 - not_read
    assert run(grouped(kernel, operands, FLOPS, 1e12)).seconds == pytest.approx(size / MEMORY_RATE, rel=1e-9)


def test_rows_that_no_expert_is_chosen_for_take_no_time():
    kernel, operands, exceeding, _ = GROUPED["gmm"]
    instruction = parse_hlo(module_text(grouped(kernel, operands, FLOPS, 1e9))).entry.instructions["gmm.1"]
    seconds = kernel_seconds(instruction, DEVICES["TPU v5 lite"], 0.25)
    rate = GROUPED_EFFICIENCY * DEVICES["TPU v5 lite"].flops
    assert seconds == pytest.approx(FLOPS * exceeding * (16 + 7) / 64 / rate)


def test_compiled_for_tpus_grouped_matmuls_do_the_flops_of_chosen_experts():
    """Gate and up, forward and backward: six products, two of them in one kernel, of all rows and of no matrix but
    their own, within 10 % of the FLOPs; and nothing else of the rows' size, such as a sum of gradients.  The tiles are
    the largest, and fit the vector memory of a v4."""
    pytest.importorskip("libtpu")
    mesh = jax.sharding.Mesh(topology_devices(Slice("v4", (2, 2, 1))), ("dp",))

    def step(x_RD, gate_EDF, up_EDF, sizes_E):
        ys_RF, pull = jax.vjp(lambda x, *ws: in_kernels(x, ws, sizes_E), x_RD, gate_EDF, up_EDF)
        return pull(ys_RF)

    sizes = (98304, 4096), (8, 4096, 8192), (8, 4096, 8192), (8,)
    dtypes = *[jnp.bfloat16] * 3, jnp.int32
    of_all = NamedSharding(mesh, P())
    shapes = [jax.ShapeDtypeStruct(*each, sharding=of_all) for each in zip(sizes, dtypes, strict=True)]
    lowered = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())).lower(*shapes)
    text = lowered.compile().as_text()
    kernels = [one for one in parse_hlo(text).entry.instructions.values() if "tpu_custom_call" in one.attributes]
    done = sum(kernel_flops(kernel) * grouped_tiles(kernel, 1.0).of_shapes for kernel in kernels)
    assert len(kernels) == 5
    assert 1.0 <= done / (6 * 2 * 98304 * 4096 * 8192) < 1.1
    assert "= bf16[98304,4096]{1,0:T(8,128)(2,1)} fusion(" not in text
    assert "convolution(" not in text, "XLA multiplies rows by all matrices"
