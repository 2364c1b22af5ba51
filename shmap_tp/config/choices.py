"""The values that a configuration key chooses from; the key's description in `schema.py` says what each means."""

from enum import StrEnum

TensorParallelMode = StrEnum("TensorParallelMode", ["all_reduce", "sequence", "collective_matmul"])
Zero = StrEnum("Zero", ["none", "zero1", "fsdp"])
FsdpGradients = StrEnum("FsdpGradients", ["reduce_scatter", "ring"])
Block = StrEnum("Block", ["parallel", "sequential", "parallel_two_norms"])
Norm = StrEnum("Norm", ["layernorm", "rmsnorm", "rmsnorm_unit_offset"])
Mlp = StrEnum("Mlp", ["gelu", "gelu_erf", "swiglu", "geglu", "clamped_swiglu"])
PositionKind = StrEnum("PositionKind", ["alibi", "rotary", "learned"])
RouterScores = StrEnum("RouterScores", ["softmax", "sigmoid"])
RotaryPairing = StrEnum("RotaryPairing", ["half", "neighbouring"])
RotaryScaling = StrEnum("RotaryScaling", ["none", "llama3", "linear", "yarn", "yarn_unrounded"])
AdapterScale = StrEnum("AdapterScale", ["rank", "sqrt_rank"])
NormPlacement = StrEnum("NormPlacement", ["before", "after", "both"])
LayerKind = StrEnum("LayerKind", ["local", "global", "nope"])
AttentionKernel = StrEnum("AttentionKernel", ["auto", "chunked", "splash", "cudnn"])
Remat = StrEnum("Remat", ["none", "full", "attention_output", "attention", "mlp", "attention_and_up", "all_matmuls"])
SavedActivation = StrEnum("SavedActivation", "input sublayer_output query_key_value attention_output gate up")
Documents = StrEnum("Documents", ["isolated", "joined"])
Precision = StrEnum("Precision", ["auto", "float32", "bfloat16"])
MomentumDtype = StrEnum("MomentumDtype", ["float32", "bfloat16"])
MatmulPrecision = StrEnum("MatmulPrecision", ["bfloat16", "int8", "fp8"])
MatmulRounding = StrEnum("MatmulRounding", ["nearest", "stochastic"])
MatmulScope = StrEnum("MatmulScope", ["blocks", "mlp"])
Schedule = StrEnum("Schedule", ["cosine", "linear", "constant", "wsd"])
OptimizerName = StrEnum("OptimizerName", ["adamw", "muon"])
Resume = StrEnum("Resume", ["never", "if_present", "must"])

HeldIn = StrEnum("HeldIn", [*Precision, "int8"])
"""No key, but --dtype of a command and `dtype` of the library: what the weights of a model that is used are held in."""
