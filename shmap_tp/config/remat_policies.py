"""The activations that each activation-checkpointing policy saves by name.

`model/remat.py` says what the names stand for and builds the JAX policies; only saved activations can be offloaded.
"""

from shmap_tp.config.schema import Remat, SavedActivation

_EVERY_SUBLAYER = (SavedActivation.input, SavedActivation.sublayer_output)
_ATTENTION = (SavedActivation.query_key_value, SavedActivation.attention_output)

SAVED_BY_REMAT = {
    Remat.none: (),
    Remat.full: (SavedActivation.input,),
    Remat.attention: (*_EVERY_SUBLAYER, *_ATTENTION),
    Remat.mlp: (*_EVERY_SUBLAYER, SavedActivation.gate, SavedActivation.up),
    Remat.attention_and_up: (*_EVERY_SUBLAYER, *_ATTENTION, SavedActivation.up),
    Remat.all_matmuls: tuple(SavedActivation),
}
"""Policy to activations.  `none` saves every intermediate array without a name, so nothing of it can be offloaded."""
