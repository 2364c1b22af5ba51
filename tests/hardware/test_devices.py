"""The tables agree with the published figures and with each other, and compiler options are combined correctly."""

import importlib.util
import os

import jax
import jax.numpy as jnp
import pytest

from shmap_tp.config.choices import MatmulPrecision
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import DEVICES, GENERATIONS, GIB, NETWORK_RATE, generation, require_units, table_peak
from shmap_tp.hardware.xla_options import (
    COMPILER_OPTIONS,
    HOST_OFFLOAD,
    SHORTER_FUSION_ESTIMATE,
    compile_with,
    compiler_options,
)
from tests.helpers.fresh_process import python
from tests.helpers.model_fixtures import config

# version: (bfloat16 TFLOP/s per chip, JAX devices per chip, GB/s of a link in one direction, dims of the torus)
PUBLISHED = {
    "v2": (45, 2, None, 2),
    "v3": (123, 2, 82, 2),  # 656 Gbit/s; the scaling book states 100
    "v4": (275, 1, 45, 3),
    "v5e": (197, 1, 45, 2),
    "v5p": (459, 1, 90, 3),
    "v6e": (918, 1, 90, 2),
    "tpu7x": (2307, 2, None, 3),
}
# FLOPs per cycle of a 128 x 128 (from v6e on 256 x 256) matrix unit, times the units of a JAX device
PER_CYCLE = {
    "v2": 2 * 128**2,
    "v3": 2 * 128**2 * 2,
    "v4": 2 * 128**2 * 4 * 2,
    "v5e": 2 * 128**2 * 4,
    "v5p": 2 * 128**2 * 4 * 2,
    "v6e": 2 * 256**2 * 4,
    "tpu7x": 2 * 256**2 * 4,
}
USABLE = {"v3": 15.48, "v4": 30.75, "v5e": 15.75}
"""Usable GiB per device, as the compiler reported them in published logs."""
every_version = pytest.mark.parametrize("version", GENERATIONS)


@every_version
def test_a_generation_is_found_by_its_device_kind_and_has_the_published_figures(version):
    made, (tflops, cores, link, dims) = GENERATIONS[version], PUBLISHED[version]
    assert generation(made.kind) is made
    assert DEVICES[made.kind].flops * cores == pytest.approx(tflops * 1e12)
    assert (made.cores, made.dims) == (cores, dims)
    assert link is None or made.link_rate == pytest.approx(link * 1e9)
    assert DEVICES[made.kind].memory == USABLE.get(version, DEVICES[made.kind].memory / GIB) * GIB


@every_version
def test_the_peak_equals_clock_times_flops_per_cycle(version):
    device = DEVICES[GENERATIONS[version].kind]
    assert device.clock * PER_CYCLE[version] == pytest.approx(device.flops, rel=0.02)


@every_version
def test_the_largest_slice_consists_of_whole_hosts(version):
    made = GENERATIONS[version]
    assert len(made.largest) == made.dims and len(made.host) == max(made.dims, len(made.host))
    assert all(side % host == 0 for side, host in zip(made.largest, made.host, strict=True))
    assert all(made.wraps(side) for side in made.largest), "a pod is a torus"


def test_v5p_has_two_names():
    assert DEVICES["TPU v5p"] is DEVICES["TPU v5"]
    assert generation("TPU v5p") is generation("TPU v5") is GENERATIONS["v5p"]


def test_tpus_have_a_generation_and_a_clock_and_gpus_have_neither():
    for kind, device in DEVICES.items():
        assert (device.clock is not None) == (generation(kind) is not None) == kind.startswith("TPU"), kind
        assert device.flops > device.memory_rate > device.memory > 1e9, kind
        assert device.source


def test_gpu_peaks_and_the_network_equal_the_published_figures():
    for kind, tflops in {"NVIDIA A100-SXM4-80GB": 312, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H200": 989}.items():
        assert DEVICES[kind].flops == tflops * 1e12
    assert NETWORK_RATE == 2.5e10


def test_a_format_without_units_is_refused_with_those_that_the_device_has():
    for kind, precision, instead in [
        ("TPU v3", "int8", "use bfloat16"),
        ("TPU v5 lite", "fp8", "use int8 or bfloat16"),
        ("TPU7x", "int8", "use fp8 or bfloat16"),
        ("NVIDIA A100-SXM4-80GB", "fp8", "use int8 or bfloat16"),
    ]:
        with pytest.raises(UserError, match=f"matmul_precision={precision}: {kind} has no units for it; {instead}"):
            require_units(MatmulPrecision(precision), kind)
    for kind, precision in [("TPU v3", "bfloat16"), ("TPU v6 lite", "int8"), ("NVIDIA B200", "fp8"), ("cpu", "fp8")]:
        require_units(MatmulPrecision(precision), kind)


def test_a_peak_counts_all_devices_and_names_its_source():
    peak = table_peak("TPU v3", 32)
    assert peak.flops == pytest.approx(16 * 123e12) and peak.source.startswith("32 x TPU v3: ")
    assert table_peak("cpu", 8) is None


def test_only_devices_of_the_table_have_options():
    assert COMPILER_OPTIONS.keys() <= DEVICES.keys()
    assert compiler_options("cpu", config()) == {}
    assert compiler_options("TPU v4", config()) == COMPILER_OPTIONS["TPU v4"]
    assert compiler_options("TPU v5p", config()) == compiler_options("TPU v5", config()) != {}


def test_run_compiler_options_override_the_table():
    (name, value), *_ = COMPILER_OPTIONS["TPU v4"].items()
    given = [f"run.compiler_options.{name}=not {value}", "run.compiler_options.xla_other=1"]
    found = compiler_options("TPU v4", config(*given))
    assert found == COMPILER_OPTIONS["TPU v4"] | {name: f"not {value}", "xla_other": "1"}
    assert COMPILER_OPTIONS["TPU v4"][name] == value


OFFLOADS, RINGS = "model.offload=[up] model.remat=attention_and_up", "mesh.tensor_parallel=collective_matmul"


@pytest.mark.parametrize(
    ("settings", "options", "kinds"),
    [
        (OFFLOADS, HOST_OFFLOAD, [kind for kind in DEVICES if kind.startswith("TPU")]),
        (f"{RINGS} model.context=8", SHORTER_FUSION_ESTIMATE, ["TPU v4", "TPU v5 lite"]),
    ],
    ids=["host offload raises the scheduler limit on TPUs", "collective matmul has its own on v4 and v5e"],
)
def test_a_setting_has_compiler_options_of_its_own_which_those_of_the_run_override(settings, options, kinds):
    for kind in DEVICES:
        more = dict(
            compiler_options(kind, config(*settings.split())).items() - compiler_options(kind, config()).items()
        )
        assert more == (options if kind in kinds else {})
    (name,) = options
    overridden = config(*settings.split(), f"run.compiler_options.{name}=90")
    assert compiler_options("TPU v5 lite", overridden)[name] == "90"


REJECTED = {
    "No such compile option: 'xla_typo'": {"xla_typo": "1"},
    "While setting option xla_cpu_enable_fast_math, 'maybe' is not a valid": {"xla_cpu_enable_fast_math": "maybe"},
}


@pytest.mark.parametrize("message", REJECTED)
def test_an_option_that_xla_rejects_is_named(message):
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    with pytest.raises(UserError, match=f"^run.compiler_options, or .*xla_options.py: {message}"):
        compile_with(lowered, REJECTED[message])
    assert compile_with(lowered, {"xla_cpu_enable_fast_math": "True"})(jnp.ones(3))[0] == 2


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'")
@pytest.mark.skipif(os.environ.get("TPU_SKIP_MDS_QUERY") != "1", reason="this machine has a TPU")
def test_libtpu_prints_nothing_on_a_machine_without_a_tpu():
    script = "import shmap_tp.parallel.mesh, jax\nprint(jax.devices()[0].platform)"
    unset = dict.fromkeys(("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"))
    environment = {"JAX_PLATFORMS": "", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # also where another process has loaded it
    done = python(f"import os\n[os.environ.pop(name, None) for name in {[*unset]}]\n{script}", **environment)
    assert done.stdout.strip() in ("cpu", "gpu") and done.stderr == ""
