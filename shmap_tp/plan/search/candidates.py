"""The candidates of a search, from the mesh to the activations that are offloaded, and which the formulas keep."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shmap_tp.config.activation_names import SAVED_BY_REMAT
from shmap_tp.config.choices import FsdpGradients, MatmulPrecision, Remat, SavedActivation, TensorParallelMode, Zero
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import divisors, validate
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import require_units
from shmap_tp.parallel.mesh import make_mesh
from shmap_tp.plan.report import Row
from shmap_tp.plan.search.formulas import Estimate, activation_values, estimates
from shmap_tp.plan.targets import Target, devices_of, machine_of

# What can be chosen

PRECISION = "train.matmul_precision"
KEYS = (
    "mesh.dp", "mesh.mp", "mesh.cp", "mesh.ep", "mesh.tensor_parallel", "mesh.zero", "mesh.fsdp_gradients",
    "train.microbatches", PRECISION, "model.remat", "model.row_major", "model.offload",
)  # fmt: skip
"""What is searched, in the words of the configuration; PRECISION among those that are given."""
CHOICES = {
    "mesh.tensor_parallel": TensorParallelMode, "mesh.zero": Zero, "mesh.fsdp_gradients": FsdpGradients,
    PRECISION: MatmulPrecision, "model.remat": Remat, "model.row_major": ("false", "true"),
    "model.offload": SavedActivation,
}  # fmt: skip
"""The names that a key takes, model.offload and PRECISION a list of them; the other keys take whole numbers."""


SHORTEST_PART = 4096
"""A shorter part of a row would not fill a device better than whole rows do."""


@dataclass(frozen=True)
class Candidate:
    """One choice of every key of KEYS."""

    dp: int
    mp: int
    cp: int
    ep: int
    tensor_parallel: TensorParallelMode
    zero: Zero
    fsdp_gradients: FsdpGradients
    microbatches: int
    matmul_precision: MatmulPrecision = MatmulPrecision.bfloat16
    remat: Remat = Remat.full
    row_major: bool = False
    offload: tuple[SavedActivation, ...] = ()

    def values(self) -> dict[str, str]:
        """The value of every key of KEYS, as an override of a configuration has it."""
        *values, _, _ = vars(self).values()
        of_model = _written(self.row_major), f"[{','.join(self.offload)}]"
        return dict(zip(KEYS, [*map(str, values), *of_model], strict=True))

    def settings(
        self, cp: int = 1, ep: int = 1, row_major: bool = False, precision: MatmulPrecision = MatmulPrecision.bfloat16
    ) -> list[str]:
        """As overrides of a configuration with these mesh.cp, mesh.ep, model.row_major and train.matmul_precision,
        which are left out where they stay."""
        known = {"mesh.cp": str(cp), "mesh.ep": str(ep), "model.row_major": _written(row_major)}
        known[PRECISION] = str(precision)
        return [f"{key}={value}" for key, value in self.values().items() if known.get(key) != value]

    def apply(self, config: Config) -> Config:
        """`config` with these choices."""
        mesh = replace(
            config.mesh, dp=self.dp, mp=self.mp, cp=self.cp, ep=self.ep, tensor_parallel=self.tensor_parallel,
            zero=self.zero, fsdp_gradients=self.fsdp_gradients,
        )  # fmt: skip
        train = replace(
            config.train, microbatches=self.microbatches, max_sequences_per_device=None,
            matmul_precision=self.matmul_precision,
        )  # fmt: skip
        model = replace(config.model, remat=self.remat, row_major=self.row_major, offload=list(self.offload))
        return replace(config, mesh=mesh, train=train, model=model)

    def __str__(self) -> str:
        mode = f" {self.tensor_parallel}" if self.mp > 1 else ""
        ring = "+ring" if self.fsdp_gradients == FsdpGradients.ring else ""
        offload = f", offload {' + '.join(self.offload)}" if self.offload else ""
        more = [f" {axis}={size}" for axis, size in (("cp", self.cp), ("ep", self.ep)) if size > 1]
        mesh = f"({self.dp}, {self.mp})" + "".join(more)
        row_major = ", row-major" if self.row_major else ""
        precision = f", {self.matmul_precision}" if self.matmul_precision != MatmulPrecision.bfloat16 else ""
        mesh = f"{mesh}{mode} {self.zero}{ring}"
        return f"{mesh}, {self.microbatches} mb{precision}, remat {self.remat}{offload}{row_major}"


def _written(value: bool) -> str:
    """As YAML has it."""
    return str(value).lower()


def candidates(config: Config, target: Target, fixed: dict[str, str]) -> list[Candidate]:
    """Every valid candidate for the batch of `config`; `fixed` are keys of KEYS whose value is given.
    model.row_major has that value, or that of `config`: the formulas know of no difference (see `sibling`).
    train.matmul_precision has each of the given values, separated by commas, or that of `config`.

    Raises UserError for a value that is no choice of its key, or that the devices have no units for.
    """
    fixed, found = _normal(fixed), []
    precisions = [MatmulPrecision(one) for one in fixed.pop(PRECISION, str(config.train.matmul_precision)).split(",")]
    for precision in precisions:
        require_units(precision, machine_of(target).kind)
    row_major = fixed.get("model.row_major", _written(config.model.row_major)) == "true"
    for base in _meshes(config, target, fixed):
        values = activation_values(base.apply(config))
        for remat in Remat:
            if remat == Remat.attention_and_up and not values[SavedActivation.gate] and "model.remat" not in fixed:
                continue  # without a gate it is all_matmuls
            choices = [
                replace(base, matmul_precision=precision, remat=remat, row_major=row_major, offload=offload)
                for precision in precisions
                for offload in _offloads(values, remat, target)
            ]
            found += [choice for choice in choices if _matches(choice, fixed)]
    return found


def _normal(fixed: dict[str, str]) -> dict[str, str]:
    """The given values as `Candidate.settings` writes them.  Raises UserError for a value that is no choice of its
    key."""
    normal = {key: value.replace(" ", "") for key, value in fixed.items()}
    for key, value in normal.items():
        if key not in CHOICES:
            if not value.isdecimal():
                raise UserError(f"{key}={fixed[key]} is no whole number")
            continue
        names, choices = [name for name in value.strip("[]").split(",") if name], list(CHOICES[key])
        for name in names:
            if name not in choices:
                raise UserError(f"{key}={fixed[key]}: {name} is none of {', '.join(choices)}")
        if key == "model.offload":
            normal[key] = f"[{','.join(name for name in choices if name in names)}]"
    return normal


def _matches(candidate: Candidate, fixed: dict[str, str]) -> bool:
    return fixed.items() <= candidate.values().items()


def _meshes(config: Config, target: Target, fixed: dict[str, str]) -> Iterator[Candidate]:
    """Everything but remat and offload."""
    of_mesh = {key: value for key, value in fixed.items() if not key.startswith("model.")}
    for mp, cp, ep in itertools.product(divisors(target.devices), _cuts(config, fixed), _ranks_of_experts(config)):
        if target.devices % (mp * cp * ep):
            continue
        dp = target.devices // mp // cp
        for mode, zero, gradients in itertools.product(TensorParallelMode, Zero, FsdpGradients):
            if mp == 1 and mode != TensorParallelMode.all_reduce and "mesh.tensor_parallel" not in fixed:
                continue  # every mode does the same
            if dp * cp == 1 and zero != Zero.none and "mesh.zero" not in fixed:
                continue  # every stage does the same
            if "mesh.fsdp_gradients" not in fixed and zero != Zero.fsdp and gradients == FsdpGradients.ring:
                continue
            if config.train.batch % dp:
                continue
            for microbatches in divisors(config.train.batch // dp):
                candidate = Candidate(
                    dp, mp, cp, ep, mode, zero, gradients, microbatches, matmul_precision=config.train.matmul_precision
                )
                if _matches(candidate, of_mesh) and _is_valid(candidate.apply(config), target):
                    yield candidate


def _cuts(config: Config, fixed: dict[str, str]) -> list[int]:
    """The numbers of devices over which a row may be cut: with parts of SHORTEST_PART positions or more."""
    if "mesh.cp" in fixed:
        return [int(fixed["mesh.cp"])]
    return [1, *(n for n in divisors(config.model.context) if n > 1 and config.model.context // n >= SHORTEST_PART)]


def _ranks_of_experts(config: Config) -> list[int]:
    """The numbers of dp ranks over which experts may be sharded."""
    return divisors(config.model.experts) if config.model.experts else [1]


def _is_valid(config: Config, target: Target) -> bool:
    try:
        validate(config)
        make_mesh(config.mesh, devices_of(target))
    except UserError:
        return False
    return True


def _offloads(values: dict[SavedActivation, float], remat: Remat, target: Target) -> list[tuple[SavedActivation, ...]]:
    """Every set of saved activations that this model has, the empty one first; only that where no host has memory."""
    saved = [name for name in SAVED_BY_REMAT[remat] if values[name] and machine_of(target).host_memory]
    return [chosen for count in range(len(saved) + 1) for chosen in itertools.combinations(saved, count)]


# Which the formulas keep, with a margin for their error

MEMORY_MARGIN = 1.2
"""A candidate is dropped if the formulas say that it needs more than this times the memory: on models that were left
out of the fit they say 0.86 to 1.13 times the compiled peak."""
SURE = 0.9
"""A candidate surely fits if the formulas say that it needs at most this times the memory."""
TIME_MARGIN = 1.5
"""A candidate is dropped if the formulas say that it takes more than this times the fastest that surely fits."""


@dataclass(frozen=True)
class Result:
    """What is known of a candidate: by the formulas, and once its compilation has ended, by the compiler."""

    candidate: Candidate
    estimate: Estimate
    row: Row | None = None
    """The row of the compiled step; None until it is compiled."""
    error: str | None = None
    """Why there is no row although the compilation has ended."""
    compile_seconds: float | None = None
    """None until the compilation has ended."""
    lacked_memory: bool = False
    """Whether it was killed as the system does where memory runs out (signal 9)."""

    @property
    def seconds(self) -> float:
        """Seconds of a step: infinite where the compiled step does not fit; by the formulas until it is compiled."""
        if self.compile_seconds is None:
            return self.estimate.seconds
        return self.row.step_seconds if self.row is not None and self.row.fits else math.inf

    @property
    def peak_bytes(self) -> float:
        """Peak memory of the compiled step; by the formulas as long as nothing is compiled."""
        return self.estimate.peak_bytes if self.row is None else float(self.row.peak_bytes_per_device)

    def fits_in(self, limit_bytes: float) -> bool:
        """What the compiler says, whose peak may include vector memory (`targets.Compiled`), or the formulas with
        a margin."""
        if self.compile_seconds is None:
            return self.peak_bytes <= SURE * limit_bytes
        return math.isfinite(self.seconds)


def sibling(one: Result) -> Result:
    """The candidate that differs in model.row_major only, as far as the formulas know it."""
    return Result(replace(one.candidate, row_major=not one.candidate.row_major), one.estimate)


def prune(config: Config, target: Target, choices: list[Candidate]) -> tuple[list[Result], Counter[str], list[Result]]:
    """Estimate every candidate, and drop those that cannot win; returns as `pruned`."""
    groups: dict[Candidate, list[Candidate]] = {}
    for one in choices:
        groups.setdefault(replace(one, offload=()), []).append(one)
    every = []
    for base, group in groups.items():
        made = estimates(base.apply(config), target, [one.offload for one in group])
        every += [Result(one, found) for one, found in zip(group, made, strict=True)]
    machine = machine_of(target)
    return pruned(every, machine.memory, machine.host_memory)


def pruned(every: list[Result], limit: float, host_limit: float) -> tuple[list[Result], Counter[str], list[Result]]:
    """Drop candidates that do not fit, that another offload improves in both memory and time, or that are too slow.

    Returns what is left, fastest first; how many were dropped for which reason; and the Pareto front of memory and
    speed without what is too large, whose last member needs the least memory of all.
    """
    dropped: Counter[str] = Counter()
    small = [one for one in every if one.peak_bytes <= MEMORY_MARGIN * limit and one.estimate.host_bytes <= host_limit]
    dropped["too large"] = len(every) - len(small)
    useful = _without_dominated_offloads(small)
    dropped["another offload is better"] = len(small) - len(useful)
    surely = [one.seconds for one in useful if one.peak_bytes <= SURE * limit]
    fastest = min(surely, default=float("inf"))
    kept = sorted((one for one in useful if one.seconds <= TIME_MARGIN * fastest), key=lambda one: one.seconds)
    dropped["too slow"] = len(useful) - len(kept)
    return kept, dropped, pareto_front(useful) or [min(every, key=lambda one: one.peak_bytes)]


def _without_dominated_offloads(every: list[Result]) -> list[Result]:
    """Without the candidates that another, which differs in model.offload only, beats in both memory and time."""
    groups: dict[Candidate, list[Result]] = {}
    for one in every:
        groups.setdefault(replace(one.candidate, offload=()), []).append(one)
    return [one for group in groups.values() for one in pareto_front(group)]


def pareto_front(every: Iterable[Result]) -> list[Result]:
    """The results that no other equals or beats in both memory and time, fastest first."""
    front: list[Result] = []
    for one in sorted(every, key=lambda one: (one.seconds, one.peak_bytes)):
        if not front or one.peak_bytes < front[-1].peak_bytes:
            front.append(one)
    return front
