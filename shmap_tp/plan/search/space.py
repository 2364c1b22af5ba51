"""The candidates of a search: mesh, ZeRO stage, tensor-parallel mode, microbatches, remat and offload."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shmap_tp.config.activation_names import SAVED_BY_REMAT
from shmap_tp.config.schema import Config, FsdpGradients, Remat, SavedActivation, TensorParallelMode, Zero
from shmap_tp.config.validate import divisors, validate
from shmap_tp.errors import UserError
from shmap_tp.parallel.mesh import DataParallelGroups, make_mesh
from shmap_tp.plan.search.formulas import activation_values
from shmap_tp.plan.search.machine import devices_of, machine_of
from shmap_tp.plan.targets import Target

KEYS = (
    "mesh.dp", "mesh.mp", "mesh.tensor_parallel", "mesh.zero", "mesh.fsdp_gradients", "train.microbatches",
    "model.remat", "model.offload",
)  # fmt: skip
"""What is searched, in the words of the configuration."""
CHOICES = {
    "mesh.tensor_parallel": TensorParallelMode, "mesh.zero": Zero, "mesh.fsdp_gradients": FsdpGradients,
    "model.remat": Remat, "model.offload": SavedActivation,
}  # fmt: skip
"""The names that a key takes; the other keys take whole numbers.  model.offload takes a list of names."""


@dataclass(frozen=True)
class Candidate:
    """One choice of every key of KEYS."""

    dp: int
    mp: int
    tensor_parallel: TensorParallelMode
    zero: Zero
    fsdp_gradients: FsdpGradients
    microbatches: int
    remat: Remat = Remat.full
    offload: tuple[SavedActivation, ...] = ()

    def settings(self) -> list[str]:
        """As overrides of a configuration."""
        values = (*list(vars(self).values())[:-1], f"[{','.join(self.offload)}]")
        return [f"{key}={value}" for key, value in zip(KEYS, values, strict=True)]

    def apply(self, config: Config) -> Config:
        """`config` with these choices."""
        mesh = replace(
            config.mesh, dp=self.dp, mp=self.mp, tensor_parallel=self.tensor_parallel, zero=self.zero,
            fsdp_gradients=self.fsdp_gradients,
        )  # fmt: skip
        train = replace(config.train, microbatches=self.microbatches, max_sequences_per_device=None)
        model = replace(config.model, remat=self.remat, offload=list(self.offload))
        return replace(config, mesh=mesh, train=train, model=model)

    def __str__(self) -> str:
        mode = f" {self.tensor_parallel}" if self.mp > 1 else ""
        ring = "+ring" if self.fsdp_gradients == FsdpGradients.ring else ""
        offload = f", offload {'+'.join(self.offload)}" if self.offload else ""
        return f"({self.dp}, {self.mp}){mode} {self.zero}{ring}, {self.microbatches} mb, remat {self.remat}{offload}"


def candidates(config: Config, target: Target, fixed: dict[str, str]) -> list[Candidate]:
    """Every valid candidate for the batch of `config`; `fixed` are keys of KEYS whose value is given.

    Raises UserError for a value that is no choice of its key.
    """
    fixed, found = _normal(fixed), []
    for base in _meshes(config, target, fixed):
        values = activation_values(base.apply(config))
        for remat in Remat:
            if remat == Remat.attention_and_up and not values[SavedActivation.gate] and "model.remat" not in fixed:
                continue  # without a gate it is all_matmuls
            choices = [replace(base, remat=remat, offload=offload) for offload in _offloads(values, remat, target)]
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
    given = dict(item.split("=", 1) for item in candidate.settings())
    return all(given[key] == value for key, value in fixed.items())


def _meshes(config: Config, target: Target, fixed: dict[str, str]) -> Iterator[Candidate]:
    """Everything but remat and offload."""
    of_mesh = {key: value for key, value in fixed.items() if not key.startswith("model.")}
    for mp in divisors(target.devices):
        dp = target.devices // mp
        for mode, zero, gradients in itertools.product(TensorParallelMode, Zero, FsdpGradients):
            if mp == 1 and mode != TensorParallelMode.all_reduce and "mesh.tensor_parallel" not in fixed:
                continue  # every mode does the same
            if dp == 1 and zero != Zero.none and "mesh.zero" not in fixed:
                continue  # every stage does the same
            if "mesh.fsdp_gradients" not in fixed and zero != Zero.fsdp and gradients == FsdpGradients.ring:
                continue
            if config.train.batch % dp:
                continue
            for microbatches in divisors(config.train.batch // dp):
                candidate = Candidate(dp, mp, mode, zero, gradients, microbatches)
                if _matches(candidate, of_mesh) and _is_valid(candidate.apply(config), target):
                    yield candidate


def _is_valid(config: Config, target: Target) -> bool:
    try:
        validate(config)
        DataParallelGroups.of(config.mesh)
        make_mesh(config.mesh, devices_of(target))
    except UserError:
        return False
    return True


def _offloads(values: dict[SavedActivation, float], remat: Remat, target: Target) -> list[tuple[SavedActivation, ...]]:
    """Every set of saved activations that this model has, the empty one first; only that where no host has memory."""
    saved = [name for name in SAVED_BY_REMAT[remat] if values[name] and machine_of(target).host_memory]
    return [chosen for count in range(len(saved) + 1) for chosen in itertools.combinations(saved, count)]
