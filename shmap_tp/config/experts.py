"""The rules of a model with experts, and what cannot be combined with them."""

from shmap_tp.config.schema import Block, Mlp, ModelConfig
from shmap_tp.errors import UserError

MATRICES = {"all", "mlp", "gate", "up", "down"}
"""Names in model.adapter.matrices that would be of matrices of experts."""


def check_experts(model: ModelConfig) -> None:
    """Raises UserError naming the first rule that is broken."""
    count = f"model.experts={model.experts}"
    if not model.experts:
        for key in ("shared_expert_ffn", "router_balance_loss", "router_z_loss"):
            if value := getattr(model, key):
                raise UserError(
                    f"model.{key}={value} has no effect with {count} (model {model.name}); set model.experts, or "
                    f"model.{key}=0"
                )
        return
    if model.experts_per_token > model.experts:
        raise UserError(
            f"model.experts_per_token={model.experts_per_token} is above {count} (model {model.name}); use at most "
            f"{model.experts}"
        )
    refused = {
        f"model.block={model.block}": (model.block != Block.sequential, "model.block=sequential"),
        f"model.mlp={model.mlp}": (model.mlp not in (Mlp.swiglu, Mlp.geglu), "model.mlp=swiglu or geglu"),
        "model.mlp_bias=true": (model.mlp_bias, "model.mlp_bias=false"),
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
