"""Plan generation on a slice that is not attached: compile prefill and decode, and simulate their schedules.

The programs are those of `inference/programs.py` with greedy choice, computing in bfloat16 with matrices of bfloat16,
or with those of the blocks in int8.
A decode step reads the weights and the whole cache of its device once, so the memory bandwidth bounds it:

    bound = (bytes of the weights after FSDP gathering, without tables of which rows are looked up, + bytes of the
             cache) / memory bandwidth
"""

import argparse
import importlib.metadata
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shmap_tp.config.choices import HeldIn, Zero
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError, refuse_first
from shmap_tp.hardware.devices import DEVICES
from shmap_tp.hardware.xla_options import compiler_options
from shmap_tp.inference.cache import cache_bytes
from shmap_tp.inference.generator import SLOTS_MULTIPLE, Options
from shmap_tp.inference.programs import GenerationPrograms, PrefillShape, Progress, with_blocks
from shmap_tp.layers.experts import even_share
from shmap_tp.model.flops import parameters
from shmap_tp.model.sharded_model import held_in
from shmap_tp.model.transformer import Transformer
from shmap_tp.parallel.mesh import MP, axis_sizes, make_mesh
from shmap_tp.parallel.partitioning import named_shardings, shard_bytes, sharded_dim
from shmap_tp.plan.compiled_communication import communication_in_hlo
from shmap_tp.plan.flags import config_from_flags, save_row
from shmap_tp.plan.hlo_parser import parse_hlo
from shmap_tp.plan.ledger import Entry, communication_in_jaxpr, comparison, format_bytes, table, without_trivial_axes
from shmap_tp.plan.predict import CACHE
from shmap_tp.plan.report import PREDICTED, ROW_INDENT, mesh_fields
from shmap_tp.plan.schedule_simulator import SimulatedSchedule, simulate
from shmap_tp.plan.targets import Compiled, compile_ahead_of_time, coordinates, find_target
from shmap_tp.plan.tpu import LinkModel, Slice, topology_devices
from shmap_tp.runtime.console import wrap_lines
from shmap_tp.training.model_functions import build_model_functions

DTYPE = jnp.bfloat16
GREEDY = Options()
"""Greedy choice; a call of the decode program computes its decode_tokens."""


@dataclass(frozen=True)
class Requests:
    """What is generated: `batch` prompts over all devices, of `prompt` tokens, each continued by `new` tokens."""

    batch: int
    prompt: int
    new: int

    @property
    def padded_prompt(self) -> int:
        """Tokens, rounded up as `generator.stream` does."""
        return _rounded(self.prompt)

    @property
    def slots(self) -> int:
        """Slots of each sequence in the cache: the prompt and the new tokens, rounded up as there."""
        calls = -(-(self.new - 1) // GREEDY.decode_tokens)
        return _rounded(self.padded_prompt + calls * GREEDY.decode_tokens)


def _rounded(tokens: int) -> int:
    return -(-tokens // SLOTS_MULTIPLE) * SLOTS_MULTIPLE


@dataclass
class GenerationRow:
    """A prediction.  Bytes are those of one device; times are None where a program does not fit."""

    model: str
    params: int
    dp: int
    mp: int
    zero: str
    device_kind: str
    devices: int
    chips: int
    topology: str | None
    batch: int
    prompt: int
    new: int
    weight_bytes: int
    """Stored."""
    read_bytes: int
    """Weights that a decode step reads."""
    cache_bytes: int
    peak_bytes: int | float
    """The larger peak of the two programs, decode's with the stacked weights that it has a copy of."""
    limit_bytes: int | float
    fits: bool
    bound_seconds: float
    """The least time of a decode step, by the memory bandwidth."""
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    """Time of a decode step: one token of every sequence."""
    exposed_comm_seconds: float | None = None
    """Exposed communication of a decode step."""
    scopes: dict[str, float] = field(default_factory=dict)
    """Seconds of a decode step by scope of the model; waiting for collectives and copies has scopes of its own."""
    compile_seconds: float = 0.0
    dtype: str = HeldIn.bfloat16
    """What matrices are held in."""
    kind: str = PREDICTED
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens of all sequences together; prefill is not counted."""
        return self.batch / self.decode_seconds if self.decode_seconds else None

    def to_json(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class GenerationPrediction:
    """A predicted row, its two programs, and what they communicate as they are traced, by "prefill" and "decode"."""

    row: GenerationRow
    prefill: Compiled
    decode: Compiled
    communication: dict[str, list[Entry]]


def predict_generation(
    config: Config,
    target: Slice,
    requests: Requests,
    dtype: HeldIn = HeldIn.bfloat16,
    cache: Path | None = CACHE,
) -> GenerationPrediction:
    """Compile the programs of generation for a slice, and simulate them if they fit; matrices are held in bfloat16 or
    int8.

    Raises UserError if dp does not divide the batch, the sequences exceed model.context, or there are several slices.
    """
    refuse_first(_faults(config, requests))
    devices = topology_devices(target)
    mesh = make_mesh(config.mesh, devices)
    kind = devices[0].device_kind
    functions = build_model_functions(config, mesh, DTYPE)
    programs = GenerationPrograms(config.model, functions.model)
    shapes = held_in(functions.shapes, DTYPE, int8=dtype == HeldIn.int8)
    options = compiler_options(kind, config)
    traced = trace(programs, shapes, mesh, requests)
    compiled = [compile_ahead_of_time(program.lower(), mesh, cache, options) for program in traced]
    prefill, decode = compiled
    is_copied = programs.copies_blocks(shapes, _progress(programs, traced[0]).cache)
    beside = shard_bytes(shapes.blocks) if is_copied else 0  # the stacked blocks, which decode does not read
    schedules: list[SimulatedSchedule | None] = [None, None]
    if prefill.fits and decode.fits:
        link_model = LinkModel.of(target.generation, coordinates(mesh))
        share = even_share(config.model, config.mesh)
        schedules = [simulate(parse_hlo(program.text), link_model, chosen_share=share) for program in compiled]
    read = read_bytes(shapes, config.mesh.mp)
    cached = cache_bytes(config.model, config.mesh.dp, config.mesh.mp, requests.batch, requests.slots, DTYPE)
    fields = mesh_fields(mesh, config)
    row = GenerationRow(
        model=config.model.name,
        params=parameters(config.model),
        dp=config.mesh.dp,
        mp=config.mesh.mp,
        zero=str(config.mesh.zero),
        devices=len(devices),
        **asdict(requests),
        weight_bytes=shard_bytes(shapes),
        read_bytes=read,
        cache_bytes=cached,
        peak_bytes=max(prefill.peak_bytes, decode.peak_bytes + beside),
        limit_bytes=DEVICES[kind].memory,
        fits=prefill.fits and decode.fits,
        bound_seconds=(read + cached) / DEVICES[kind].memory_rate,
        compile_seconds=prefill.seconds + decode.seconds,
        dtype=str(dtype),
        versions={"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")},
        **{name: fields[name] for name in ("device_kind", "chips", "topology")},
        **_times(*schedules),
    )
    sizes, jaxprs = axis_sizes(config.mesh), [program.jaxpr.jaxpr for program in traced]
    communication = [without_trivial_axes(communication_in_jaxpr(jaxpr), sizes) for jaxpr in jaxprs]
    return GenerationPrediction(row, prefill, decode, dict(zip(("prefill", "decode"), communication, strict=True)))


def trace(
    programs: GenerationPrograms, shapes: Transformer, mesh: Mesh, requests: Requests
) -> tuple[jax.stages.Traced, jax.stages.Traced]:
    """(prefill, decode of GREEDY.decode_tokens tokens) for parameters of these shapes."""
    prompts = _integers(mesh, (requests.batch, requests.padded_prompt), P(programs.batch, None))
    numbers = _integers(mesh, (requests.batch,), P(programs.batch))
    static, shape = {"filters": GREEDY.filters}, PrefillShape(requests.slots, samples=1)
    prefill = programs.prefill.trace(shapes, GREEDY.sampling, prompts, numbers, **static, shape=shape)
    progress = _progress(programs, prefill)
    if programs.copies_blocks(shapes, progress.cache):
        each = programs.unstack.trace(shapes.blocks).out_info
        shapes = with_blocks(shapes, jax.tree.map(_shape, each, programs.layer_shardings(each)))
    return prefill, programs.decode.trace(shapes, GREEDY.sampling, progress, **static, count=GREEDY.decode_tokens)


def _progress(programs: GenerationPrograms, prefill: jax.stages.Traced) -> Progress:
    """What a traced prefill hands on to decode, as shapes with their shardings."""
    shardings = named_shardings(programs.mesh, programs.progress_specs(GREEDY.filters))
    return jax.tree.map(_shape, prefill.out_info[1], shardings)


def _shape(x: Any, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding)


def _integers(mesh: Mesh, shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))


def _faults(config: Config, requests: Requests) -> Iterator[str]:
    for flag, value in (
        ("--batch", requests.batch),
        ("--prompt-tokens", requests.prompt),
        ("--new-tokens", requests.new),
    ):
        if value < 1:
            yield f"{flag} {value} is too small; it must be 1 or more"
    if config.mesh.slices > 1:
        yield "generation is planned on one slice; omit --slices, and serve more prompts on each slice alone"
    if requests.batch % config.mesh.dp:
        yield f"--batch {requests.batch} is not divisible by --dp {config.mesh.dp}, which serves different prompts"
    tokens = requests.prompt + requests.new
    if tokens > config.model.context:
        yield (
            f"--prompt-tokens {requests.prompt} and --new-tokens {requests.new} are {tokens} tokens, above "
            f"model.context={config.model.context}; shorten them, or raise --context"
        )


def _times(prefill: SimulatedSchedule | None, decode: SimulatedSchedule | None) -> dict[str, Any]:
    if prefill is None or decode is None:
        return {}
    steps = GREEDY.decode_tokens
    return {
        "prefill_seconds": prefill.seconds,
        "decode_seconds": decode.seconds / steps,
        "exposed_comm_seconds": decode.exposed_comm_seconds / steps,
        "scopes": {name: seconds / steps for name, seconds in decode.scopes.items()},
    }


def read_bytes(shapes: Transformer, mp: int) -> int:
    """Bytes of the weights of one device that a decode step reads: all but the tables of which it looks up rows, the
    positions and an embedding that is not the head."""
    looked_up = [shapes.positions] + ([] if shapes.head is None else [shapes.embedding])
    return _bytes_over_mp(shapes, mp) - _bytes_over_mp(looked_up, mp)


def _bytes_over_mp(tree: Any, mp: int) -> int:
    """Bytes on a device of parameters that are sharded over mp, but not over dp."""

    def size(leaf: jax.ShapeDtypeStruct) -> int:
        return leaf.size * leaf.dtype.itemsize // (1 if sharded_dim(leaf.sharding.spec, MP) is None else mp)

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))


def format_generation(row: GenerationRow) -> str:
    """A row as text: a few lines, every figure with its unit."""
    sharded = "; weights sharded over dp, too (FSDP)" if row.zero == Zero.fsdp else ""
    computed = ", computing in bfloat16" if row.dtype == HeldIn.int8 else ""
    lines = [
        f"{row.kind.upper()}  {row.model}, generation on {row.devices} x {row.device_kind}, {row.topology} chips",
        f"  mesh           dp={row.dp}, mp={row.mp}{sharded}; {row.dtype}{computed}",
        f"  requests       {row.batch} prompts of {row.prompt} tokens, {row.new} new tokens each",
        f"  memory         {format_bytes(int(row.peak_bytes))} of {format_bytes(int(row.limit_bytes))} per device: "
        f"weights {format_bytes(row.weight_bytes)}, cache {format_bytes(row.cache_bytes)}"
        + ("" if row.fits else ": DOES NOT FIT; try a larger --mp, more devices, a smaller --batch or fewer tokens"),
        f"  compile        {row.compile_seconds:.1f} s, prefill and decode",
    ]
    if row.decode_seconds:
        lines += [
            f"  prefill        {1e3 * row.prefill_seconds:.1f} ms, {row.batch * row.prompt / row.prefill_seconds:,.0f} "
            f"tokens/s",
            f"  decode         {1e3 * row.decode_seconds:.2f} ms a step; {row.tokens_per_second:,.0f} tokens/s, "
            f"{1 / row.decode_seconds:,.0f} of each sequence; {1e3 * row.exposed_comm_seconds:.2f} ms exposed "
            f"communication",
        ]
        parts = sorted(row.scopes.items(), key=lambda part: -part[1])
        lines.append("  scopes         " + ", ".join(f"{name} {1e3 * s:.2f} ms" for name, s in parts if s >= 5e-6))
    bound = f"  bound          {1e3 * row.bound_seconds:.2f} ms a step by memory bandwidth: "
    bound += f"{format_bytes(row.read_bytes)} of weights and the cache"
    if row.decode_seconds:
        bound += f"; decode takes {row.decode_seconds / row.bound_seconds:.1f} times that"
    return "\n".join([*lines, bound])


# The command: python -m shmap_tp.plan decode

PROMPT_TOKENS, NEW_TOKENS, PROMPTS = 1024, 256, 8
"""Where the flags say nothing else: tokens of a prompt and of its continuation, prompts on each dp rank."""


def generation_command(arguments: argparse.Namespace) -> None:
    """Print the predicted row, and the communication of a decode call as planned and as compiled.  Raises UserError."""
    batch, arguments.batch = arguments.batch, None  # config.train.batch does not matter
    config = config_from_flags(arguments, "llama3_8b", 1, 1)
    context = config.model.context
    requests = Requests(
        batch=PROMPTS * config.mesh.dp if batch is None else batch,
        prompt=min(PROMPT_TOKENS, context // 2) if arguments.prompt_tokens is None else arguments.prompt_tokens,
        new=min(NEW_TOKENS, context // 4) if arguments.new_tokens is None else arguments.new_tokens,
    )
    target = find_target(arguments.version, config.mesh.devices, arguments.topology, config.mesh.slices)
    if not isinstance(target, Slice):
        raise UserError(f"--version {arguments.version}: generation is planned for TPUs only; choose a TPU")
    print(f"compiling prefill and decode for {target} ...", flush=True)
    dtype = HeldIn(arguments.dtype or HeldIn.bfloat16)
    prediction = predict_generation(config, target, requests, dtype)
    save_row(prediction.row, arguments)
    print(wrap_lines(format_generation(prediction.row), ROW_INDENT))
    print_traced_and_compiled(config, prediction)


def print_traced_and_compiled(config: Config, prediction: GenerationPrediction) -> None:
    """What decoding communicates, and whether both compiled programs communicate as they are traced."""
    sizes = axis_sizes(config.mesh)
    print(f"\nCOMMUNICATION of decoding {GREEDY.decode_tokens} tokens of each sequence, as traced")
    print(table(prediction.communication["decode"], total="together"))
    for name, program in (("prefill", prediction.prefill), ("decode", prediction.decode)):
        if program.text is not None:
            compared = comparison(prediction.communication[name], communication_in_hlo(program.text, sizes))
            print(wrap_lines(f"\nCOMPILED COLLECTIVES of {name}: {compared}"))
