"""Token ids that a caller passes: checked before they reach a device, where a wrong id would be no error."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array

from shmap_tp.config.schema import ModelConfig
from shmap_tp.errors import UserError

Tokens = np.ndarray | Array | Sequence[Sequence[int]]
"""Token ids [batch, time]."""


def checked(tokens: Tokens, model: ModelConfig, longest: int, least: int) -> np.ndarray:
    """tokens[B, T] as int32 on the host.  Raises UserError if they are not tokens of this model."""
    tokens, vocabulary = np.asarray(tokens), model.vocabulary
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer) or 0 in tokens.shape:
        raise UserError(f"tokens must be integers [batch, time], not {tokens.dtype}{list(tokens.shape)}")
    if tokens.shape[1] > longest:
        raise UserError(
            f"tokens have {tokens.shape[1]} positions, and with model.context={model.context} there are at most "
            f"{longest}; cut them into shorter sequences"
        )
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < least or highest >= vocabulary:
        wrong = lowest if lowest < least else highest
        raise UserError(f"token id {wrong} is not in {least} to {vocabulary - 1} (model.vocabulary={vocabulary})")
    return tokens.astype(np.int32)
