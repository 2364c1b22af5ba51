"""Options of a model that a baseline refuses, because it does not compute them and would be another model."""

from omegaconf import OmegaConf

from shmap_tp.config.compose import CONF
from shmap_tp.config.schema import Block, Mlp, ModelConfig, Norm
from shmap_tp.errors import UserError

PLAIN = {
    "block": {Block.parallel, Block.sequential},
    "norm": {Norm.layernorm, Norm.rmsnorm},
    "mlp": {Mlp.gelu, Mlp.swiglu},
}


def refuse_options(model: ModelConfig, baseline: str, *, supported: tuple[str, ...] = ()) -> None:
    """Raises UserError if `model` has an option beyond those of conf/model_defaults.yaml that is not `supported`."""
    plain = PLAIN | {key: [value] for key, value in OmegaConf.load(CONF / "model_defaults.yaml").items()}
    for key, values in plain.items():
        value = getattr(model, key)
        if key not in supported and value not in values:
            raise UserError(
                f"{baseline} has no model.{key}={str(value).lower()} (model {model.name}); compare a model without it"
            )
