"""What experts cost beyond matmuls with as many FLOPs: in their products, and in the rows that are brought to them."""

from shmap_tp.config.activation_names import SAVED_BY_REMAT
from shmap_tp.config.schema import MeshConfig, ModelConfig, Remat, SavedActivation
from shmap_tp.hardware.devices import generation
from shmap_tp.layers.experts import rows_of_a_token
from shmap_tp.layers.grouped_matmul import row_tile
from shmap_tp.plan.tpu import GROUPED_EFFICIENCY

VALUES_OF_A_ROW = 4.6, 9.5
"""How often each value of a row counts among the activations of a layer, where rows stay on their device and where they
are sent to others: with the constant of `TIME` for activations 30 and 62 passes over memory.  Chosen so that the time
of compiled steps of Qwen3-30B-A3B and OLMoE-1B-7B with ep 8 and 32 is met within a quarter; half where rows stay."""


def row_values(model: ModelConfig, mesh: MeshConfig) -> float:
    """Values per token and layer of the rows that a device brings to its experts and back."""
    if not model.experts:
        return 0.0
    return VALUES_OF_A_ROW[mesh.ep > 1] * rows_of_a_token(model, mesh) * model.width


def grouped_excess(model: ModelConfig, tokens: int, mesh: MeshConfig, kind: str) -> float:
    """FLOPs per token, at the peak, whose time the kernels for experts of a TPU take beyond the FLOPs of the chosen
    experts: they compute tiles that two experts share twice, and reach GROUPED_EFFICIENCY.  0 for other devices, of
    `kind`.  `tokens`: those of a microbatch on one dp rank.

    Three products of D F weights, each forward and twice backward; gate and up once more where they are not saved.
    """
    made = generation(kind)
    if not model.experts or made is None or not made.has_kernels:
        return 0.0
    experts, chosen = model.experts // (mesh.ep * mesh.mp), tokens * model.experts_per_token / mesh.mp
    tile = row_tile(int(tokens * rows_of_a_token(model, mesh)), experts)
    excess = (chosen + (experts - 1) * tile) / chosen / GROUPED_EFFICIENCY - 1
    saved = (
        2
        if model.remat == Remat.none
        else len({SavedActivation.gate, SavedActivation.up}.intersection(SAVED_BY_REMAT[model.remat]))
    )
    return 2 * (11 - saved) * model.experts_per_token * model.width * model.ffn * model.layers * excess
