"""The names and types of the configuration keys of the `model` section.  Their values are in `conf/` only.

This module imports no JAX, so that a configuration can be read, checked and printed on a machine without devices.
"""

from dataclasses import dataclass

from shmap_tp.config.choices import (
    AttentionKernel,
    Block,
    Mlp,
    Norm,
    Positions,
    Remat,
    RotaryPairing,
    RotaryScaling,
    SavedActivation,
)


@dataclass
class ModelConfig:
    name: str
    """Name of the model in tables and messages."""
    from_pretrained: str | None
    """A Hugging Face directory (config.json and *.safetensors), or a model's name on the hub.  The other keys of this
    section follow from its config.json, and a new run starts from its weights; null starts from random ones."""
    width: int
    """D, the size of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """H, the number of query heads; mp must divide it."""
    kv_heads: int
    """N, key/value heads; it divides `heads`.  mp must divide it or be a multiple of it (heads are then replicated)."""
    head_dim: int
    """K, the size of one head; it need not be width / heads."""
    ffn: int
    """F, the hidden size of the MLP; mp must divide it."""
    vocabulary: int
    """V, the number of token ids."""
    vocabulary_multiple: int
    """The embedding and output head are padded to a multiple of this, which mp must divide; the loss is the same."""
    context: int
    """T, the number of tokens per training sequence; mp must divide it unless tensor_parallel=all_reduce."""
    block: Block
    """parallel: attention and MLP read the same input and share their collectives.  parallel_two_norms: as parallel,
    but attention and MLP each have the scale and bias of a norm of their own.  sequential: MLP after attention."""
    norm: Norm
    """Normalisation layer.  rmsnorm_unit_offset: RMSNorm multiplied by 1 + weight instead of by the weight."""
    norm_epsilon: float | None
    """Added to the variance in a norm; null is 1e-5 for layernorm and 1e-6 for the others."""
    norm_bias: bool
    """Whether every LayerNorm adds a bias."""
    qk_norm: bool
    """Whether each head of q and of k is normalised by an RMSNorm, before the rotary encoding."""
    mlp: Mlp
    """MLP and its activation.  gelu: GELU in its tanh form.  gelu_erf: exact GELU.  swiglu, geglu: a gate projection
    beside the up projection, with SiLU or with GELU in its tanh form."""
    qkv_bias: bool
    """Whether the query, key and value projections add a bias."""
    attention_output_bias: bool
    """Whether the output projection of attention adds a bias."""
    mlp_bias: bool
    """Whether the projections of the MLP add a bias."""
    head_bias: bool
    """Whether the output head adds a bias; it needs tie_embeddings=false."""
    positions: Positions
    """Position encoding."""
    rotary_base: float
    """For positions=rotary: pair k of R/2 is rotated by position x base^(-2k/R)."""
    rotary_dim: int | None
    """For positions=rotary: R, how many elements of each head are rotated, the first ones; null is all of them."""
    rotary_pairing: RotaryPairing
    """For positions=rotary: which elements form a pair.  half: k and k + R/2.  neighbouring: 2k and 2k + 1."""
    rotary_scaling: RotaryScaling
    """For positions=rotary.  llama3: rates whose wavelength exceeds original_context / low_frequency_factor are divided
    by the factor, those below original_context / high_frequency_factor stay, and between them it is interpolated."""
    rotary_scaling_factor: float
    """For rotary_scaling=llama3: what low rates are divided by."""
    rotary_low_frequency_factor: float
    """For rotary_scaling=llama3: number of rotations in the original context below which the rate is divided."""
    rotary_high_frequency_factor: float
    """For rotary_scaling=llama3: number of rotations in the original context above which the rate stays."""
    rotary_original_context: int
    """For rotary_scaling=llama3: the context that the model was trained with before its rates were scaled."""
    tie_embeddings: bool
    """Whether the output head is the transposed embedding."""
    embedding_scale: float
    """The embedding is multiplied by this, rounded to the dtype of the activations; 1 changes nothing."""
    init_std: float
    """Standard deviation of the initial weights; projections into the residual stream use init_std / sqrt(2 layers)."""
    remat: Remat
    """Activation checkpointing: which activations of a block are saved, so that its backward pass does not recompute
    them.  none: all.  full: only the input.  attention: also q, k, v, the attention output and the sublayer outputs.
    mlp: also the sublayer outputs and the MLP's gate and up.  attention_and_up: as attention, and up.  all_matmuls: all
    of these.  All-gathered FSDP weights are never saved."""
    offload: list[SavedActivation]
    """Which of the saved activations are offloaded to host memory until the backward pass; no effect on CPU."""
    attention: AttentionKernel
    """What computes attention.  chunked: plain XLA, attention_chunk queries at a time.  splash: a Pallas kernel for TPU
    v4 and later.  cudnn: NVIDIA's kernel.  auto: the device's kernel where it supports this model, else chunked."""
    attention_chunk: int
    """For attention=chunked: the number of queries whose scores are in memory at a time."""


def padded_vocabulary(model: ModelConfig) -> int:
    """Rows of the embedding: the vocabulary rounded up to model.vocabulary_multiple."""
    return -(-model.vocabulary // model.vocabulary_multiple) * model.vocabulary_multiple
