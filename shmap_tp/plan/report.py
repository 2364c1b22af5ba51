"""One row of a benchmark: a measured or predicted training step, as JSON and as printed text."""

import math
from dataclasses import asdict, dataclass, field, replace

from jax.sharding import Mesh

from shmap_tp.config.choices import AttentionKernel, FsdpGradients, MatmulPrecision, MatmulScope, Remat, Zero
from shmap_tp.config.schema import Config
from shmap_tp.hardware.devices import DEVICES, Peak, generation
from shmap_tp.hardware.torus import Torus
from shmap_tp.hardware.xla_options import compiler_options
from shmap_tp.model.flops import flops_per_token, frozen_parameters, hardware_flops_per_token, parameters
from shmap_tp.model.sharded_model import CONFIGURED_MODEL, ModelComponents
from shmap_tp.parallel.mesh import CP, DP, EP, MP
from shmap_tp.plan.ledger import format_bytes

EXPLICIT, GSPMD = "explicit", "gspmd"
PREDICTED, ESTIMATED = "predicted", "estimated"

ROW_INDENT = 17
"""Columns before the figures of a row (`format_row`, `generation.format_generation`)."""
STATE_BYTES = 16
"""Bytes of a parameter over all devices: itself, its gradient and the two moments of AdamW, in float32."""
FROZEN_BYTES = 2
"""Bytes of a frozen parameter, in bfloat16."""

FORMULA = (
    "MFU = tokens/s x model FLOPs per token (causal attention counted at half, recomputation not counted) / peak; "
    "HFU counts recomputation too"
)


@dataclass
class Row:
    """Bytes, seconds and FLOPs.  `None`: unknown, such as the step time of a program that does not fit."""

    kind: str
    """measured: timed on the named devices.  emulated: timed on emulated CPU devices.  predicted: compiled for the
    named devices by their own compiler, and its schedule simulated.  estimated: compiled for GPUs, memory and
    collectives as compiled; the time is by formulas that no GPU has confirmed (gpu/)."""
    program: str
    """explicit: our step.  gspmd: the same step sharded by the compiler (benchmarks/gspmd_baseline.py)."""
    model: str
    params: int
    dp: int
    mp: int
    device_kind: str
    devices: int
    chips: int
    topology: str | None
    slices: int
    tile: list[int] | None
    """Shape of one mp group: devices along x, y, z and the cores of a chip."""
    global_batch: int
    context: int
    microbatches: int
    block: str
    """parallel or sequential: how attention and MLP of a layer are combined."""
    remat: str
    tensor_parallel: str
    """The tensor-parallel mode of `explicit`; the GSPMD baseline does not use it."""
    zero: str
    attention: str
    """The attention kernel; where the configuration says `auto`, the one selected for these devices."""
    tokens_per_step: int
    peak_flops_per_device: float | None
    peak_source: str | None
    model_flops_per_device: float
    """FLOPs of one step."""
    hardware_flops_per_device: float
    fits: bool
    compile_seconds: float
    step_seconds: float | None = None
    step_seconds_range: list[float] | None = None
    """Fastest and slowest of the timed steps."""
    peak_bytes_per_device: int | float | None = None
    limit_bytes_per_device: int | float | None = None
    host_bytes_per_device: int = 0
    """Activations offloaded to host memory."""
    comm_seconds: float | None = None
    exposed_comm_seconds: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_chip: float | None = None
    tflops_per_chip: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    fsdp_gradients: str = "reduce_scatter"
    """How the gradients of FSDP weights are reduced."""
    offload: list[str] = field(default_factory=list)
    """Saved activations that are offloaded to host memory."""
    row_major: bool = False
    """Whether saved activations are stored row by row."""
    scopes: dict[str, float] = field(default_factory=dict)
    """Seconds of a step by named scope of the model, and by what the device waits for."""
    compiler_options: dict[str, str] = field(default_factory=dict)
    """XLA options that differ from the defaults (shmap_tp/hardware/xla_options.py)."""
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    frozen: int = 0
    """How many of `params` are not trained."""
    cp: int = 1
    """Devices over which each row is split along time."""
    ep: int = 1
    """Ranks of dp over which experts are sharded."""
    matmul_precision: str = MatmulPrecision.bfloat16
    """What linear layers and experts multiply in; the peak above is that of bfloat16."""
    matmul_scope: str = MatmulScope.blocks
    """The parts of a block that do so."""

    def __post_init__(self) -> None:
        """Derive throughput and utilisation from the step time."""
        if self.step_seconds is None:
            return
        self.tokens_per_second = self.tokens_per_step / self.step_seconds
        self.tokens_per_second_per_chip = self.tokens_per_second / self.chips
        rate = self.model_flops_per_device / self.step_seconds
        self.tflops_per_chip = rate * self.devices / self.chips / 1e12
        if self.peak_flops_per_device:
            self.mfu = rate / self.peak_flops_per_device
            self.hfu = self.hardware_flops_per_device / self.step_seconds / self.peak_flops_per_device

    def to_json(self) -> dict:
        return asdict(self)


def config_fields(
    config: Config,
    attention: AttentionKernel,
    devices: int,
    peak: Peak | None,
    components: ModelComponents = CONFIGURED_MODEL,
) -> dict:
    """The fields of a Row that follow from a configuration and the components that replace parts of its model.

    `attention` is the kernel selected for these devices, `peak` the sum over all of them.  Raises UncountedError where
    the FLOPs of a component cannot be counted.
    """
    model, tokens = replace(config.model, attention=attention), config.train.batch * config.model.context
    return {
        "model": model.name,
        "params": parameters(model, components=components),
        "frozen": frozen_parameters(model, components=components),
        DP: config.mesh.dp,
        CP: config.mesh.cp,
        EP: config.mesh.ep,
        MP: config.mesh.mp,
        "devices": devices,
        "global_batch": config.train.batch,
        "context": model.context,
        "microbatches": config.train.microbatches,
        "block": str(model.block),
        "remat": str(model.remat),
        "offload": [str(name) for name in model.offload],
        "row_major": model.row_major,
        "tensor_parallel": str(config.mesh.tensor_parallel),
        "zero": str(config.mesh.zero),
        "matmul_precision": str(config.train.matmul_precision),
        "matmul_scope": str(config.train.matmul_scope),
        "fsdp_gradients": str(config.mesh.fsdp_gradients),
        "attention": str(attention),
        "tokens_per_step": tokens,
        "peak_flops_per_device": peak.flops / devices if peak else None,
        "peak_source": peak.source if peak else None,
        "model_flops_per_device": tokens * flops_per_token(model, components=components) / devices,
        "hardware_flops_per_device": tokens * hardware_flops_per_token(model, components=components) / devices,
    }


def mesh_fields(mesh: Mesh, config: Config) -> dict:
    """The fields of a Row that describe the devices of a mesh."""
    devices = list(mesh.devices.flat)
    torus, tpu = Torus.of(devices), generation(devices[0].device_kind)
    return {
        "device_kind": devices[0].device_kind,
        "compiler_options": compiler_options(devices[0].device_kind, config),
        "chips": len(devices) // tpu.cores if tpu else len(devices),
        "topology": "x".join(map(str, torus.sides[: tpu.dims])) if torus else None,
        "slices": len({getattr(device, "slice_index", 0) for device in devices}),
        "tile": list(config.mesh.tile or torus.most_compact_tile(config.mesh.mp)) if torus else None,
    }


def format_row(row: Row) -> str:
    """A row as text: a few lines, every figure with its unit."""
    devices = f"{row.devices} x {row.device_kind}" + (f", {row.topology} chips" if row.topology else "")
    devices += f", {row.slices} slices" if row.slices > 1 else ""
    tile = f", mp on {'x'.join(map(str, row.tile))} (x, y, z, core)" if row.tile else ""
    experts = f", ep={row.ep}" if row.ep > 1 else ""
    program = "" if row.program == EXPLICIT else f"{row.program} of "
    trained = f" ({_format_count(row.params - row.frozen)} trained)" if row.frozen else ""
    lines = [
        f"{row.kind.upper()}  {program}{row.model}, {_format_count(row.params)} parameters{trained}, on {devices}",
        f"  mesh           dp={row.dp}, {f'cp={row.cp}, ' if row.cp > 1 else ''}mp={row.mp}{experts}{tile}",
        f"  step           {row.global_batch} sequences of {row.context} in {row.microbatches} microbatches = "
        f"{row.tokens_per_step:,} tokens; {_format_settings(row)}",
    ]
    if row.peak_bytes_per_device is not None:
        lines.append(_format_memory(row))
    lines.append(f"  compile        {row.compile_seconds:.1f} s")
    if row.step_seconds is not None:
        lines += _format_time(row)
    return "\n".join(lines)


def _format_count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


def _format_settings(row: Row) -> str:
    offload = f", offload {', '.join(row.offload)}" if row.offload else ""
    row_major = ", row-major" if row.row_major else ""
    tensor_parallel = f"; tensor parallelism {row.tensor_parallel}" if row.program == EXPLICIT else ""
    scope = "" if row.matmul_scope == MatmulScope.blocks else f" of {row.matmul_scope}"
    matmuls = "" if row.matmul_precision == MatmulPrecision.bfloat16 else f"; matmuls{scope} in {row.matmul_precision}"
    gradients = "" if row.fsdp_gradients == FsdpGradients.reduce_scatter else f", FSDP gradients {row.fsdp_gradients}"
    return (
        f"block {row.block}; remat {row.remat}{offload}{row_major}; attention {row.attention}{tensor_parallel}; "
        f"zero {row.zero}{gradients}{matmuls}"
    )


def _format_memory(row: Row) -> str:
    lower_bound = "at least " if not row.fits and not row.compile_seconds else ""
    needed = format_bytes(int(row.peak_bytes_per_device))
    available = f" of {format_bytes(int(row.limit_bytes_per_device))}" if row.limit_bytes_per_device else ""
    host = f", plus {format_bytes(row.host_bytes_per_device)} of host memory" if row.host_bytes_per_device else ""
    advice = "" if row.fits else f": DOES NOT FIT; try {_advice(row)}"
    return f"  memory         {lower_bound}{needed}{available} per device{host}{advice}"


def _advice(row: Row) -> str:
    """What would take less memory and is not done yet; where even a state sharded over all devices is too large, how
    many devices it needs."""
    state = STATE_BYTES * (row.params - row.frozen) + FROZEN_BYTES * row.frozen
    if row.limit_bytes_per_device and state > row.devices * row.limit_bytes_per_device:
        least = math.ceil(state / row.limit_bytes_per_device)
        return f"{least} devices or more: parameters, optimizer state and gradients alone are {format_bytes(state)}"
    possible = {
        "mesh.zero=fsdp": row.program == EXPLICIT and row.dp > 1 and row.zero != Zero.fsdp,
        "a larger mp": row.mp < row.devices,
        "more microbatches": row.microbatches < row.global_batch // row.dp,
        "model.remat=full": row.remat != Remat.full,
    }
    *others, last = [name for name, applies in possible.items() if applies] or ["more devices"]
    return f"{', '.join(others)} or {last}" if others else last


def _eight_bit_mfu(row: Row) -> str:
    device = DEVICES.get(row.device_kind)
    if device is None or row.matmul_precision not in device.eight_bit:
        return ""
    peak = device.eight_bit[row.matmul_precision]
    mfu = row.mfu * row.peak_flops_per_device / peak
    return f"; MFU {mfu:.1%} of the {row.matmul_precision} peak, {peak / 1e12:,.0f} TFLOP/s per device"


def _format_time(row: Row) -> list[str]:
    spread = f" ({row.step_seconds_range[0]:.3f} to {row.step_seconds_range[1]:.3f})" if row.step_seconds_range else ""
    lines = [
        f"  time           {row.step_seconds:.3f} s per step{spread}; {row.tokens_per_second:,.0f} tokens/s, "
        f"{row.tokens_per_second_per_chip:,.0f} per chip; {row.tflops_per_chip:.3g} TFLOP/s per chip"
    ]
    if row.mfu is not None:
        lines.append(f"  MFU            {row.mfu:.1%}, HFU {row.hfu:.1%} of {row.peak_source}{_eight_bit_mfu(row)}")
    if row.kind == ESTIMATED:
        lines.append("  calibration    none: the time is an estimate by formulas, which no GPU has confirmed")
    if row.kind == PREDICTED:
        lines.append(f"  calibration    {format_calibration(row.device_kind, row.step_seconds)}")
    if row.comm_seconds is not None:
        lines.append(
            f"  communication  {row.comm_seconds:.3f} s, of which {row.exposed_comm_seconds:.3f} s "
            f"({row.exposed_comm_seconds / row.step_seconds:.1%} of the step) exposed"
        )
    if row.scopes:
        scopes = sorted(row.scopes.items(), key=lambda item: -item[1])
        lines.append(
            "  scopes         " + ", ".join(f"{name} {s / row.step_seconds:.1%}" for name, s in scopes if s > 0)
        )
    return lines


@dataclass(frozen=True)
class Calibration:
    """Published seconds / seconds predicted for our step, over the runs that shard the same work the same way."""

    constant: float
    """Geometric mean of the ratios."""
    lowest: float
    highest: float
    runs: int


CALIBRATIONS = {
    "TPU v2": Calibration(1.10, 1.10, 1.10, 1),
    "TPU v3": Calibration(1.19, 1.08, 1.24, 3),
    "TPU v4": Calibration(1.11, 1.11, 1.11, 1),
    "TPU v5 lite": Calibration(1.24, 1.18, 1.30, 8),
    "TPU v5": Calibration(1.12, 1.08, 1.16, 4),
    "TPU v6 lite": Calibration(1.12, 1.05, 1.18, 10),
    "TPU7x": Calibration(1.14, 1.13, 1.14, 2),
}
"""By jax.Device.device_kind."""


def format_calibration(device_kind: str, step_seconds: float) -> str:
    """One line: what a step predicted to take `step_seconds` takes if published runs are a guide."""
    found = CALIBRATIONS.get(device_kind)
    if found is None:
        return f"not calibrated: no published run on {device_kind} was compared"
    spread = f"{found.lowest:.2f} to {found.highest:.2f}" if found.runs > 1 else f"{found.constant:.2f}"
    runs = f"{found.runs} published runs" if found.runs > 1 else "the one published run"
    return (
        f"{runs} on {device_kind} took {spread} times the predicted step; "
        f"times {found.constant:.2f} this is {found.constant * step_seconds:.3f} s"
    )
