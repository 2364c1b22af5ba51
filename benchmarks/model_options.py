"""Options of a model that a baseline refuses, because it does not compute them and would be another model."""

from omegaconf import OmegaConf

from shmap_tp.config.choices import Block, Mlp, Norm
from shmap_tp.config.compose import CONF, to_dict
from shmap_tp.config.schema import ModelConfig
from shmap_tp.errors import UserError

PLAIN = {
    "block": {Block.parallel, Block.sequential},
    "norm": {Norm.layernorm, Norm.rmsnorm},
    "mlp": {Mlp.gelu, Mlp.swiglu},
}


def refuse_options(model: ModelConfig, baseline: str, *, supported: tuple[str, ...] = ()) -> None:
    """Raises UserError if `model` has an option beyond those of conf/model_defaults.yaml that is not `supported`."""
    defaults, given = OmegaConf.to_container(OmegaConf.load(CONF / "model_defaults.yaml")), to_dict(model)
    for key, values in (PLAIN | {key: [value] for key, value in defaults.items()}).items():
        value = given[key]
        if key not in supported and value not in values:
            raise UserError(
                f"{baseline} has no model.{key}={str(value).lower()} (model {model.name}); compare a model without it"
            )
