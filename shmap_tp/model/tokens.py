"""Tokens as callers give them, and as they stand in a batch, where the sign says whether a token counts as a target.

B batch, T time.

    id >= 0     an input, and a target that counts
    -1 - id     the same input, but no target that counts: the token of a prompt, for example
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from shmap_tp.config.schema import ModelConfig
from shmap_tp.errors import UserError

Tokens = np.ndarray | Array | Sequence[Sequence[int]]
"""Token ids [batch, time]."""
Counted = np.ndarray | Array | Sequence[Sequence[bool]]
"""For each token of [batch, time], whether it counts as a target.  Either way it is an input: with False for the tokens
of a prompt, the model reads the prompt and learns only what follows it."""
IGNORE = -1
"""Pads the end of a row: not counted, and as an input id 0, which nothing counted depends on."""


def input_ids(tokens_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The ids of a batch's tokens, of both signs."""
    return jnp.where(tokens_BT < 0, ~tokens_BT, tokens_BT)


def uncounted(tokens: Int[np.ndarray, "B T"], where: Bool[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
    """`tokens`, those selected by `where` marked as targets that do not count: id becomes -1 - id."""
    return np.where(where, ~tokens, tokens)


def rectangular(tokens: Tokens) -> np.ndarray:
    """`tokens` on the host.  Raises UserError if they are lists of different lengths."""
    try:
        return np.asarray(tokens)
    except ValueError:
        raise UserError("tokens must be integers [batch, time], but their rows have different lengths") from None


def checked_tokens(tokens: Tokens, model: ModelConfig, *, longest: int, least: int) -> Int32[np.ndarray, "B T"]:
    """`tokens` on the host.  Raises UserError unless they are `least` to vocabulary - 1, and no row is too long."""
    tokens, vocabulary = rectangular(tokens), model.vocabulary
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


def marked_tokens(tokens: Tokens, counted: Counted | None, model: ModelConfig) -> Int32[np.ndarray, "B T"]:
    """Sequences of at most T + 1 tokens as they stand in a batch: those that are not `counted` below zero.

    Raises UserError as `checked_tokens` does, if an id follows a -1, or if `counted` is not a bool for each token.
    """
    tokens = checked_tokens(tokens, model, longest=model.context + 1, least=IGNORE)
    padding = tokens == IGNORE
    if (inside := padding[:, :-1] & ~padding[:, 1:]).any():
        row, column = np.argwhere(inside)[0]
        raise UserError(
            f"tokens[{row}, {column}] is -1, but an id follows, and -1 only pads the end of a row;\n"
            f"to leave a target out of the loss, give its id, and counted=... with False there"
        )
    if counted is None:
        return tokens
    counted = np.asarray(counted)
    if counted.shape != tokens.shape or counted.dtype != bool:
        raise UserError(
            f"counted must be bool{list(tokens.shape)}, one for each token, not {counted.dtype}{list(counted.shape)}"
        )
    return uncounted(tokens, ~counted & ~padding)
