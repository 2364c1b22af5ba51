"""`transformers` in float64 throughout.

In a model of float64 it computes the angles of the rotary encoding, RMSNorm and the softmax of attention in float32, by
`torch.float32`, `torch.float` and `Tensor.float` in the code of its models.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.modeling_utils  # makes tables of dtypes when it is imported, which must not be in the block below

from tests.helpers.pretrained_models import in_files, read_tensors


@contextmanager
def float64_throughout() -> Iterator[None]:
    """A block in which everything that names float32 gets float64."""
    names, default = (torch.float32, torch.float, torch.Tensor.float), torch.get_default_dtype()
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = names
        torch.set_default_dtype(default)


def model_in_float64(directory: Path, case: str) -> Any:
    """The model of a directory; to be called, and used, in the block of `float64_throughout`."""
    config = transformers.AutoConfig.from_pretrained(directory)
    kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **kinds).eval()
    tensors = read_tensors(directory)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.float64
            for of_file, values in in_files(name, parameter.numpy(), case).items():
                values[...] = tensors[of_file]
    return model
