"""The values of configuration keys that are enumerations; explained in `schema.py`."""

from enum import StrEnum


class TensorParallelMode(StrEnum):
    all_reduce = "all_reduce"
    sequence = "sequence"
    collective_matmul = "collective_matmul"


class Zero(StrEnum):
    none = "none"
    zero1 = "zero1"
    fsdp = "fsdp"


class FsdpGradients(StrEnum):
    reduce_scatter = "reduce_scatter"
    ring = "ring"


class Block(StrEnum):
    parallel = "parallel"
    sequential = "sequential"
    parallel_two_norms = "parallel_two_norms"


class Norm(StrEnum):
    layernorm = "layernorm"
    rmsnorm = "rmsnorm"
    rmsnorm_unit_offset = "rmsnorm_unit_offset"


class Mlp(StrEnum):
    gelu = "gelu"
    gelu_erf = "gelu_erf"
    swiglu = "swiglu"
    geglu = "geglu"


class PositionKind(StrEnum):
    alibi = "alibi"
    rotary = "rotary"
    learned = "learned"


class RotaryPairing(StrEnum):
    half = "half"
    neighbouring = "neighbouring"


class RotaryScaling(StrEnum):
    none = "none"
    llama3 = "llama3"


class AttentionKernel(StrEnum):
    auto = "auto"
    chunked = "chunked"
    splash = "splash"
    cudnn = "cudnn"


class Remat(StrEnum):
    none = "none"
    full = "full"
    attention = "attention"
    mlp = "mlp"
    attention_and_up = "attention_and_up"
    all_matmuls = "all_matmuls"


class SavedActivation(StrEnum):
    """Activations of a block that can be saved for its backward pass; see `model/remat.py`."""

    input = "input"
    sublayer_output = "sublayer_output"
    query_key_value = "query_key_value"
    attention_output = "attention_output"
    gate = "gate"
    up = "up"


class Precision(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Resume(StrEnum):
    never = "never"
    if_present = "if_present"
    must = "must"
