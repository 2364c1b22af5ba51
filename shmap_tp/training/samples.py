"""Texts that the model writes while it is trained: what the loop asks of a sampler, and when.

The sampler is made by the command (`inference/training_samples.py`): generation is above training.  It has programs of
its own and reads the parameters of the step where they are, so the step's program is the same with and without it.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from shmap_tp.config.schema import Config
from shmap_tp.data.batches import Batches
from shmap_tp.data.tokenizer import Tokenizer
from shmap_tp.errors import UserError
from shmap_tp.model.transformer import Transformer
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.training.step import Components


@runtime_checkable
class Sampler(Protocol):
    """Continues the prompts of sample.prompts."""

    def __call__(self, params: Transformer, stopped: Callable[[], bool]) -> dict[str, str] | None:
        """{prompt: what the model writes after it}, the same in every process; None if `stopped` came true."""
        ...


MakeSampler = Callable[[Config, Mesh, Components, Tokenizer], Sampler | None]
"""Returns None, and says why, if the model cannot generate; raises UserError if a prompt does not suit it."""


def text_tools(
    config: Config, mesh: Mesh, batches: Batches, components: Components, make_sampler: MakeSampler | None
) -> tuple[Sampler | None, int | None]:
    """(the sampler, the UTF-8 bytes of the text of an evaluation, on process 0); None, and a line that says why, where
    the data's tokenizer is not known."""
    try:
        tokenizer = batches.text_tokenizer()
    except UserError as error:
        print_on_process_0(f"no samples and no bits per byte: {error}")
        return None, None
    counted = batches.validation_bytes(tokenizer) if jax.process_index() == 0 else None
    if make_sampler is None or not config.sample.prompts:
        return None, counted
    return make_sampler(config, mesh, components, tokenizer), counted
