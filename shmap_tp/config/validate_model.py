"""The rules that a model must satisfy on any machine: its heads, its options, and what it offloads."""

from shmap_tp.config.choices import Block, Mlp, Norm, Positions, RotaryPairing, RotaryScaling, SavedActivation
from shmap_tp.config.model_schema import ModelConfig
from shmap_tp.config.remat_policies import SAVED_BY_REMAT
from shmap_tp.errors import UserError


def validate_model(model: ModelConfig, mp: int) -> None:
    """Check every rule of the model alone.  Raises UserError naming the first that is broken."""
    _check_heads(model, mp)
    _check_rotary(model)
    _check_options(model)
    _check_offload(model)


def divisors(size: int) -> list[int]:
    """The divisors of `size` up to 1024."""
    return [n for n in range(1, min(size, 1024) + 1) if size % n == 0]


def _check_heads(model: ModelConfig, mp: int) -> None:
    if model.heads % model.kv_heads:
        raise UserError(f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}; choose a divisor")
    if model.kv_heads % mp and mp % model.kv_heads:
        fit = [n for n in divisors(model.heads) if model.kv_heads % n == 0 or n % model.kv_heads == 0]
        raise UserError(
            f"mesh.mp={mp} neither divides kv_heads={model.kv_heads} (model {model.name}) nor is a multiple of it; "
            f"use mesh.mp in {{{', '.join(map(str, fit))}}}"
        )


def _check_rotary(model: ModelConfig) -> None:
    if model.positions != Positions.rotary:
        given = {
            f"rotary_dim={model.rotary_dim}": model.rotary_dim is not None,
            f"rotary_pairing={model.rotary_pairing}": model.rotary_pairing != RotaryPairing.half,
            f"rotary_scaling={model.rotary_scaling}": model.rotary_scaling != RotaryScaling.none,
        }
        for option in [option for option, is_given in given.items() if is_given]:
            raise UserError(
                f"model.{option} has no effect with model.positions={model.positions} (model {model.name}); "
                f"use model.positions=rotary, or remove it"
            )
        return
    rotated = model.head_dim if model.rotary_dim is None else model.rotary_dim
    if rotated % 2:
        key = "head_dim" if model.rotary_dim is None else "rotary_dim"
        raise UserError(
            f"model.{key}={rotated} must be even for model.positions=rotary, which rotates pairs of elements"
        )
    if rotated > model.head_dim:
        raise UserError(
            f"model.rotary_dim={rotated} is above model.head_dim={model.head_dim} (model {model.name}); "
            f"use at most {model.head_dim}, or null for all of it"
        )
    low, high = model.rotary_low_frequency_factor, model.rotary_high_frequency_factor
    if model.rotary_scaling == RotaryScaling.llama3 and not 0 < low < high:
        raise UserError(
            f"model.rotary_low_frequency_factor={low} must be above 0 and below "
            f"model.rotary_high_frequency_factor={high}; Llama 3.1 has 1 and 4"
        )


def _check_options(model: ModelConfig) -> None:
    if model.norm_bias and model.norm != Norm.layernorm:
        raise UserError(
            f"model.norm_bias=true needs model.norm=layernorm, but model.norm={model.norm} (model {model.name}) has no "
            f"bias; set model.norm_bias=false"
        )
    if model.head_bias and model.tie_embeddings:
        raise UserError(
            f"model.head_bias=true needs an output head of its own, but model.tie_embeddings=true (model {model.name});"
            f" set one of them to false"
        )
    for key in ("norm_epsilon", "embedding_scale"):
        if getattr(model, key) == 0:
            raise UserError(f"model.{key}=0 must be above 0")


def _check_offload(model: ModelConfig) -> None:
    for name in model.offload:
        if name not in SAVED_BY_REMAT[model.remat]:
            policies = ", ".join(remat for remat, saved in SAVED_BY_REMAT.items() if name in saved)
            raise UserError(
                f"model.offload has {name}, which model.remat={model.remat} does not save; "
                f"use model.remat in {{{policies}}}"
            )
    if SavedActivation.gate in model.offload and model.mlp not in (Mlp.swiglu, Mlp.geglu):
        raise UserError(f"model.offload has gate, but model.mlp={model.mlp} has no gate; remove it")
    if SavedActivation.sublayer_output in model.offload and model.block != Block.sequential:
        raise UserError(
            f"model.offload has sublayer_output, which the backward pass of model.block={model.block} does not read; "
            "remove it"
        )
    if len(set(model.offload)) < len(model.offload):
        raise UserError(f"model.offload=[{','.join(model.offload)}] names an activation twice; name each once")
