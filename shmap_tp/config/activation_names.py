"""The names under which layers offer activations to rematerialisation policies (`jax.ad_checkpoint.checkpoint_name`),
and the activations that each policy saves.

A layer names what a policy may want to save; `model/blocks.py` builds the JAX policies.  Only saved activations can be
offloaded.
"""

from shmap_tp.config.choices import Remat, SavedActivation

BLOCK_INPUT = "input"
"""x as it enters a block."""
SUBLAYER_OUTPUT = "sublayer_output"
"""What a row-parallel product is after its reduction over mp."""
NORM_STATISTICS = "norm_statistics"
"""The means that a normalisation subtracts or divides by: one or two values per position."""
QUERY_KEY_VALUE = "query_key_value"
"""q, k and v of all heads of the device, after the rotary encoding."""
ATTENTION_OUTPUT = "attention_output"
"""softmax(q k') v, before the output projection."""
SOFTMAX_DENOMINATORS = "softmax_denominators"
"""What the backward pass of a flash-attention kernel needs besides: one value per query and head."""
GATE, UP = "gate", "up"
"""The outputs of the MLP's column-parallel layers."""

CHECKPOINT_NAMES = {
    SavedActivation.input: (BLOCK_INPUT,),
    SavedActivation.sublayer_output: (SUBLAYER_OUTPUT, NORM_STATISTICS),
    SavedActivation.query_key_value: (QUERY_KEY_VALUE,),
    SavedActivation.attention_output: (ATTENTION_OUTPUT, SOFTMAX_DENOMINATORS),
    SavedActivation.gate: (GATE,),
    SavedActivation.up: (UP,),
}
"""What each configurable activation (`model.remat`, `model.offload`) consists of."""

ALWAYS_ON_DEVICE = (SOFTMAX_DENOMINATORS, NORM_STATISTICS)
"""Too small to be worth a transfer to the host, even where the activation they belong to is offloaded."""

_EVERY_SUBLAYER = (SavedActivation.input, SavedActivation.sublayer_output)
_ATTENTION = (SavedActivation.query_key_value, SavedActivation.attention_output)

SAVED_BY_REMAT = {
    Remat.none: (),
    Remat.full: (SavedActivation.input,),
    Remat.attention_output: (SavedActivation.input, SavedActivation.attention_output),
    Remat.attention: (*_EVERY_SUBLAYER, *_ATTENTION),
    Remat.mlp: (*_EVERY_SUBLAYER, SavedActivation.gate, SavedActivation.up),
    Remat.attention_and_up: (*_EVERY_SUBLAYER, *_ATTENTION, SavedActivation.up),
    Remat.all_matmuls: tuple(SavedActivation),
}
"""Policy to activations.  `none` saves every intermediate array without a name, so nothing of it can be offloaded."""
