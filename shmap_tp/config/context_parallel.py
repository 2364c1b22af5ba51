"""The rules of `mesh.cp`, which cuts rows along time."""

import math

from shmap_tp.config.schema import Config, FsdpGradients, SavedActivation, TensorParallelMode
from shmap_tp.errors import UserError


def check_context_parallel(config: Config) -> None:
    """Raises UserError unless rows can be cut in two chunks for each rank of cp, and their parts again over mp where
    the mode of tensor parallelism does that; and for what cp cannot be combined with."""
    mesh, model = config.mesh, config.model
    if mesh.cp == 1:
        return
    is_time_cut = mesh.tensor_parallel != TensorParallelMode.all_reduce
    parts, what = (math.lcm(2, mesh.mp), "2 and mesh.mp") if is_time_cut else (2, "2")
    if model.context % (mesh.cp * parts):
        fit = [n for n in range(1, min(model.context, 1024) + 1) if model.context % (n * parts) == 0]
        choices = f"mesh.cp in {{{', '.join(map(str, fit))}}}, or " if fit else ""
        longer = -(-model.context // (mesh.cp * parts)) * mesh.cp * parts
        raise UserError(
            f"mesh.cp={mesh.cp}: model.context={model.context} (model {model.name}) cannot be cut in {mesh.cp} parts "
            f"that {what} divide; use {choices}model.context={longer}"
        )
    if mesh.fsdp_gradients == FsdpGradients.ring:
        raise UserError(
            f"mesh.fsdp_gradients=ring cannot be combined with mesh.cp={mesh.cp}; "
            f"use mesh.fsdp_gradients=reduce_scatter, or mesh.cp=1"
        )
    if SavedActivation.query_key_value in model.offload:
        raise UserError(
            f"model.offload with query_key_value cannot be combined with mesh.cp={mesh.cp}: keys and values of whole "
            f"rows would be written to the host; leave it out of model.offload, or use mesh.cp=1"
        )
    if config.train.dpo_beta is not None:
        raise UserError(
            f"train.dpo_beta cannot be combined with mesh.cp={mesh.cp}, which cuts the answers of a pair apart; "
            f"use mesh.cp=1"
        )
