"""One row of a benchmark: what was run or predicted, and what came out.  As JSON, and for reading."""

from dataclasses import asdict, dataclass, field, replace

from jax.sharding import Mesh

from shmap_tp.config.schema import AttentionKernel, Config, FsdpGradients
from shmap_tp.hardware.devices import Peak, generation
from shmap_tp.hardware.torus import Torus
from shmap_tp.hardware.xla_options import compiler_options
from shmap_tp.model.flops import flops_per_token, hardware_flops_per_token, parameters
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.plan.communication.ledger import human

EXPLICIT = "explicit"


FORMULA = (
    "MFU = tokens/s x model FLOPs per token (causal attention at half, nothing that is recomputed) / peak; "
    "HFU counts the recomputed, too"
)


@dataclass
class Row:
    """Bytes, seconds and FLOPs; `None` is what could not be told (a program that does not fit has no time)."""

    kind: str
    """measured: on the devices named.  emulated: run on CPU devices, says nothing of others.  predicted: compiled for
    the devices named by their own compiler, and replayed."""
    program: str
    """explicit: ours.  gspmd: the same step as the compiler cuts it (benchmarks/gspmd.py)."""
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
    """Devices of a layer along x, y, z and the cores of a chip."""
    global_batch: int
    context: int
    microbatches: int
    block: str
    """How attention and MLP of a layer stand to each other."""
    remat: str
    tensor_parallel: str
    """Of `explicit`; the compiler's twin is not told."""
    zero: str
    attention: str
    """What computes the attention of each head: as named, or as `auto` chose for these devices."""
    tokens_per_step: int
    peak_flops_per_device: float | None
    peak_source: str | None
    model_flops_per_device: float
    """Of one step."""
    hardware_flops_per_device: float
    fits: bool
    compile_seconds: float
    step_seconds: float | None = None
    step_seconds_range: list[float] | None = None
    """Of the steps that were timed, the fastest and the slowest."""
    peak_bytes_per_device: int | float | None = None
    limit_bytes_per_device: int | float | None = None
    host_bytes_per_device: int = 0
    """Kept in the host's memory between the forward and the backward pass."""
    comm_seconds: float | None = None
    exposed_comm_seconds: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_chip: float | None = None
    tflops_per_chip: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    fsdp_gradients: str = "reduce_scatter"
    """How those of shared weights go home."""
    offload: list[str] = field(default_factory=list)
    """What of what remat keeps is kept by the host."""
    places: dict[str, float] = field(default_factory=dict)
    """Seconds of a step by place in the source."""
    compiler_options: dict[str, str] = field(default_factory=dict)
    """Beyond the compiler's own choice (hardware.COMPILER_OPTIONS)."""
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""

    def __post_init__(self) -> None:
        """Everything that follows from the time of a step."""
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


def of_config(config: Config, attention: AttentionKernel, devices: int, peak: Peak | None) -> dict:
    """The fields of a Row that a configuration and its devices decide; `peak` is of all of them, and `attention` what
    computes it there."""
    model, tokens = replace(config.model, attention=attention), config.train.batch * config.model.context
    return {
        "model": model.name,
        "params": parameters(model),
        DP: config.mesh.dp,
        MP: config.mesh.mp,
        "devices": devices,
        "global_batch": config.train.batch,
        "context": model.context,
        "microbatches": config.train.microbatches,
        "block": str(model.block),
        "remat": str(model.remat),
        "offload": [str(kept) for kept in model.offload],
        "tensor_parallel": str(config.mesh.tensor_parallel),
        "zero": str(config.mesh.zero),
        "fsdp_gradients": str(config.mesh.fsdp_gradients),
        "attention": str(attention),
        "tokens_per_step": tokens,
        "peak_flops_per_device": peak.flops / devices if peak else None,
        "peak_source": peak.source if peak else None,
        "model_flops_per_device": tokens * flops_per_token(model) / devices,
        "hardware_flops_per_device": tokens * hardware_flops_per_token(model) / devices,
    }


def mesh_fields(mesh: Mesh, config: Config) -> dict:
    """The fields of a Row that say where the devices of a mesh are."""
    devices = list(mesh.devices.flat)
    torus, made = Torus.of(devices), generation(devices[0].device_kind)
    return {
        "device_kind": devices[0].device_kind,
        "compiler_options": compiler_options(devices[0].device_kind, config),
        "chips": len(devices) // made.cores if made else len(devices),
        "topology": "x".join(map(str, torus.sides[: made.dims])) if torus else None,
        "slices": len({getattr(device, "slice_index", 0) for device in devices}),
        "tile": list(config.mesh.tile or torus.most_compact_tile(config.mesh.mp)) if torus else None,
    }


def describe(row: Row) -> str:
    """A row for reading: a few lines, every figure with its unit."""
    where = f"{row.devices} x {row.device_kind}" + (f", {row.topology} chips" if row.topology else "")
    where += f", {row.slices} slices" if row.slices > 1 else ""
    tile = f", mp on {'x'.join(map(str, row.tile))} (x, y, z, core)" if row.tile else ""
    gradients = "" if row.fsdp_gradients == FsdpGradients.reduce_scatter else f", gradients {row.fsdp_gradients}"
    offload = f", offload {', '.join(row.offload)}" if row.offload else ""
    program = "" if row.program == EXPLICIT else f"{row.program} of "
    wire = f"; wire {row.tensor_parallel}" if row.program == EXPLICIT else ""
    lines = [
        f"{row.kind.upper()}  {program}{row.model}, {_count(row.params)} parameters, on {where}",
        f"  mesh      dp={row.dp}, mp={row.mp}{tile}",
        f"  step      {row.global_batch} windows of {row.context} in {row.microbatches} microbatches = "
        f"{row.tokens_per_step:,} tokens; block {row.block}; remat {row.remat}{offload}; "
        f"attention {row.attention}{wire}; zero {row.zero}{gradients}",
    ]
    if row.peak_bytes_per_device is not None:
        needs = human(int(row.peak_bytes_per_device))
        has = f" of {human(int(row.limit_bytes_per_device))}" if row.limit_bytes_per_device else ""
        bound = "at least " if not row.fits and not row.compile_seconds else ""
        way = ": DOES NOT FIT; try a larger mp, more microbatches, or model.remat=full"
        host = f", and {human(row.host_bytes_per_device)} of its host" if row.host_bytes_per_device else ""
        lines.append(f"  memory    {bound}{needs}{has} a device{host}{'' if row.fits else way}")
    lines.append(f"  compile   {row.compile_seconds:.1f} s")
    if row.step_seconds is not None:
        lines += _timed(row)
    return "\n".join(lines)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


def compare(ours: Row, theirs: Row) -> str:
    """explicit : compiler, in all that is known of both; below 1 ours is the cheaper."""
    pairs = {
        "time": (ours.step_seconds, theirs.step_seconds),
        "memory": (ours.peak_bytes_per_device, theirs.peak_bytes_per_device),
        "compile time": (ours.compile_seconds, theirs.compile_seconds),
        "time on the wires": (ours.comm_seconds, theirs.comm_seconds),
    }
    ratios = [f"{name} {a / b:.2f}" for name, (a, b) in pairs.items() if a is not None and b]
    return f"explicit : {theirs.program}  " + ", ".join(ratios)


def _timed(row: Row) -> list[str]:
    spread = f" ({row.step_seconds_range[0]:.3f} to {row.step_seconds_range[1]:.3f})" if row.step_seconds_range else ""
    lines = [
        f"  time      {row.step_seconds:.3f} s a step{spread}; {row.tokens_per_second:,.0f} tokens/s, "
        f"{row.tokens_per_second_per_chip:,.0f} a chip; {row.tflops_per_chip:.3g} TFLOP/s a chip"
    ]
    if row.mfu is not None:
        lines.append(f"  MFU       {row.mfu:.1%}, HFU {row.hfu:.1%} of {row.peak_source}")
    if row.comm_seconds is not None:
        lines.append(
            f"  wires     {row.comm_seconds:.3f} s, of which {row.exposed_comm_seconds:.3f} s "
            f"({row.exposed_comm_seconds / row.step_seconds:.1%} of the step) nothing hides"
        )
    if row.places:
        parts = sorted(row.places.items(), key=lambda item: -item[1])
        lines.append("  where     " + ", ".join(f"{name} {s / row.step_seconds:.1%}" for name, s in parts if s > 0))
    return lines
