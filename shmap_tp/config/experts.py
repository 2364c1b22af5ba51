"""The rules of a model with experts, and what cannot be combined with them."""

from shmap_tp.config.schema import AUTO, GATED_MLPS, Block, FsdpGradients, MeshConfig, ModelConfig
from shmap_tp.errors import UserError

MATRICES = {"all", "mlp", "gate", "up", "down"}
"""Names in model.adapter.matrices that would be of matrices of experts."""


def check_experts(mesh: MeshConfig, model: ModelConfig) -> None:
    """Raises UserError naming the first rule that is broken."""
    _check_expert_parallel(mesh, model)
    count = f"model.experts={model.experts}"
    if not model.experts:
        for key in ("shared_expert_ffn", "expert_capacity", "router_bias_rate", "router_balance_loss", "router_z_loss"):
            without = None if key in ("expert_capacity", "router_bias_rate") else 0
            if (value := getattr(model, key)) != without:
                raise UserError(
                    f"model.{key}={value} has no effect with {count} (model {model.name}); set model.experts, or "
                    f"model.{key}={'null' if without is None else 0}"
                )
        return
    if model.experts_per_token > model.experts:
        raise UserError(
            f"model.experts_per_token={model.experts_per_token} is above {count} (model {model.name}); use at most "
            f"{model.experts}"
        )
    refused = {
        f"model.block={model.block}": (model.block != Block.sequential, "model.block=sequential"),
        f"model.mlp={model.mlp}": (model.mlp not in GATED_MLPS, f"one of {', '.join(GATED_MLPS)}"),
        f"model.shared_expert_ffn={model.shared_expert_ffn} and model.mlp_bias=true": (
            bool(model.shared_expert_ffn) and model.mlp_bias,
            "model.mlp_bias=false",
        ),
        "model.experts_per_token=1 and model.router_normalize=true": (
            model.experts_per_token == 1 and model.router_normalize,
            "model.router_normalize=false: one weight divided by itself is 1, so that the router has no gradient",
        ),
    }
    for given, (is_refused, instead) in refused.items():
        if is_refused:
            raise UserError(f"{count} cannot be combined with {given} (model {model.name}); use {instead}")
    named = sorted(MATRICES.intersection(model.adapter.matrices))
    if model.adapter.rank and named:
        raise UserError(
            f"model.adapter.matrices has {named[0]}, but experts have no adapters ({count}); use "
            f"model.adapter.matrices=[attention]"
        )
    if model.adapter.rank and model.router_bias_rate:
        raise UserError(
            f"model.router_bias_rate={model.router_bias_rate} moves biases of routers, but with "
            f"model.adapter.rank={model.adapter.rank} checkpoints have adapters alone; use model.router_bias_rate=0"
        )


def _check_expert_parallel(mesh: MeshConfig, model: ModelConfig) -> None:
    if mesh.ep == 1:
        return
    if not model.experts:
        raise UserError(
            f"mesh.ep={mesh.ep} shards experts, and model.experts=0 (model {model.name}); set model.experts, or "
            f"mesh.ep=1"
        )
    if model.experts % (mesh.ep * mesh.mp):
        fit = [n for n in range(1, model.experts + 1) if model.experts % (n * mesh.mp) == 0]
        raise UserError(
            f"mesh.ep={mesh.ep} x mesh.mp={mesh.mp} does not divide experts={model.experts} (model {model.name}); use "
            f"mesh.ep in {{{', '.join(map(str, fit))}}}"
        )
    if mesh.dp != AUTO and mesh.dp % (mesh.slices * mesh.ep):
        ranks = f"mesh.dp={mesh.dp}" + (f" / mesh.slices={mesh.slices}" if mesh.slices > 1 else "")
        fit = [n for n in range(1, mesh.dp + 1) if mesh.dp % (n * mesh.slices) == 0]
        raise UserError(
            f"mesh.ep={mesh.ep} does not divide {ranks}, of which it is a part; use mesh.ep in "
            f"{{{', '.join(map(str, fit))}}}"
        )
    if mesh.fsdp_gradients == FsdpGradients.ring:
        raise UserError(
            f"mesh.fsdp_gradients=ring cannot be combined with mesh.ep={mesh.ep}; "
            f"use mesh.fsdp_gradients=reduce_scatter, or mesh.ep=1"
        )
