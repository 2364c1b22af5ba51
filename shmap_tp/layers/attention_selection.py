"""Selection of the attention kernel: the one that `model.attention` names, or with `auto` the best for the devices.

    TPU v4 and later   splash, where the positions are not ALiBi, 128 divides the context, of rows that are split along
                       time the context / 2cp, and the head dim is 64, 128 or 256; on v2 and v3 Pallas cannot multiply
                       bfloat16 matrices
    NVIDIA             cudnn, where the positions are not ALiBi, scores have no softcap, heads no sinks, documents are
                       joined, rows are not split along time (mesh.cp=1), the dtype has 16 bits and the head dim suits
                       cuDNN
    all else           chunked, and with auto also what cudnn cannot compute: segments that the library is given

Decided once, when programs are built, and passed down as a value: no layer asks for a device.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike

from shmap_tp.config.choices import AttentionKernel, PositionKind, SavedActivation
from shmap_tp.config.schema import ModelConfig
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import Device, generation
from shmap_tp.layers.attention import AnyAttention, Chunked
from shmap_tp.layers.flash_attention import BLOCKS, MOST_KEYS, SPLASH_HEAD_DIMS, Cudnn, Splash


def select_attention(
    model: ModelConfig, device: Device, dtype: DTypeLike, isolated: bool = False, cp: int = 1
) -> AnyAttention:
    """The attention of `model` on devices like `device`, in `dtype`, for rows whose documents are `isolated` or not,
    and which are split along time over `cp` devices.

    Raises UserError where the one that is named cannot run there.
    """
    refusals = {
        AttentionKernel.splash: _no_splash(model, device, cp),
        AttentionKernel.cudnn: _no_cudnn(model, device, dtype, isolated, cp),
    }
    defer = SavedActivation.query_key_value in model.offload
    chunked = Chunked(model.attention_chunk)
    asked = model.attention
    made = {
        AttentionKernel.splash: Splash(defer, most_keys=_most_keys(device)),
        AttentionKernel.cudnn: Cudnn(defer, chunked if asked == AttentionKernel.auto else None),
        AttentionKernel.chunked: chunked,
    }
    if asked == AttentionKernel.auto:
        asked = next((kernel for kernel, why in refusals.items() if why is None), AttentionKernel.chunked)
    if why := refusals.get(asked):
        raise UserError(
            f"model.attention={asked} (model {model.name}, {device.device_kind}): {why};\n"
            f"use model.attention=auto, or chunked, which runs everywhere"
        )
    return made[asked]


def kernel_name(attention: AnyAttention) -> AttentionKernel:
    """The name that `model.attention` has for it."""
    kinds = {Splash: AttentionKernel.splash, Cudnn: AttentionKernel.cudnn, Chunked: AttentionKernel.chunked}
    return kinds[type(attention)]


def _most_keys(device: Device) -> int:
    """In a block of splash's backward kernel: the 16 MiB of vector memory of a v4 hold half of the usual."""
    made = generation(device.device_kind)
    return MOST_KEYS // 2 if made is not None and made.platform == "v4" else MOST_KEYS


def _no_splash(model: ModelConfig, device: Device, cp: int) -> str | None:
    """Why splash cannot run, or None."""
    made = generation(device.device_kind)
    if made is None or not made.has_kernels:
        return "it is for TPU v4 and later"
    if model.positions == PositionKind.alibi:
        return "it adds no bias to scores, and model.positions=alibi needs one"
    chunks = 1 if cp == 1 else 2 * cp
    if model.context % (chunks * BLOCKS[-1]):
        what = f"model.context={model.context}" + (f" / (2 mesh.cp) = {model.context / chunks:g}" if cp > 1 else "")
        return f"its blocks have {BLOCKS[-1]} positions, which does not divide {what}"
    if model.head_dim not in SPLASH_HEAD_DIMS:
        return f"model.head_dim={model.head_dim} is not one of its {', '.join(map(str, SPLASH_HEAD_DIMS))}"
    return None


def _no_cudnn(model: ModelConfig, device: Device, dtype: DTypeLike, isolated: bool, cp: int) -> str | None:
    """Why cuDNN's flash attention cannot run, or None.  Head dims as jax.nn.dot_product_attention checks them."""
    capability = _capability(device)
    if capability < 8.0:
        return "it is for NVIDIA GPUs of compute capability 8.0 (Ampere) and later"
    if model.positions == PositionKind.alibi:
        return "it is used without a bias, and model.positions=alibi needs one"
    if model.attention_softcap is not None:
        return f"it caps no scores, and model.attention_softcap={model.attention_softcap} needs that"
    if model.attention_sinks:
        return "it has no sinks, and model.attention_sinks=true needs them"
    if cp > 1:
        return f"its queries and keys are those of whole rows, which mesh.cp={cp} cuts"
    if isolated:
        return "it cannot isolate the documents of a row; use data.documents=joined with it"
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"it computes in bfloat16 or float16, not {jnp.dtype(dtype)}; set train.precision=bfloat16"
    largest = 256 if capability >= 9.0 else 128
    if model.head_dim > largest or model.head_dim % 8:
        return f"model.head_dim={model.head_dim} must be a multiple of 8, and {largest} or less"
    return None


def _capability(device: Device) -> float:
    """The compute capability of an NVIDIA GPU; 0 for anything else (for an AMD GPU JAX reports a name, gfx...)."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except ValueError:
        return 0.0
