"""The models of conf/model, and a small one whose dims are all different."""

from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from shmap_tp.config.choices import AttentionKernel, Block, Mlp, Norm, PositionKind, Remat
from shmap_tp.config.schema import ModelConfig

ZOO = Path(__file__).parents[2] / "conf" / "model"
DEFAULTS = OmegaConf.load(ZOO.parent / "model_defaults.yaml")


def load(name: str) -> ModelConfig:
    merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), DEFAULTS, OmegaConf.load(ZOO / f"{name}.yaml"))
    return OmegaConf.to_object(merged)


# Two layers, every dimension a different number: D 8, L 2, H 6, N 3, K 5, F 7, V 11 (padded to 12), T 4.
TINY = replace(
    load("test"), name="tiny", width=8, layers=2, heads=6, kv_heads=3, head_dim=5, ffn=7, vocabulary=11,
    vocabulary_multiple=4, context=4, block=Block.sequential, norm=Norm.rmsnorm, mlp=Mlp.swiglu,
    positions=PositionKind.learned,
    tie_embeddings=False, init_std=0.02, remat=Remat.none, offload=[],
    attention=AttentionKernel.chunked, attention_chunk=4,
)  # fmt: skip
