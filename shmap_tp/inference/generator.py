"""Generation: prompts in, new tokens out, on any mesh.

    prompts  --padded on their left to one length, and to a multiple of dp prompts-->  prefill  -->  decode, some tokens
    at a time, until every sequence has ended

dp serves different prompts; mp shares each.  Every process of a run returns the same.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import index
from typing import Any

import numpy as np

from shmap_tp.config.schema import ModelConfig
from shmap_tp.config.values import faults_of_number
from shmap_tp.errors import UserError, refuse_first, shown
from shmap_tp.inference.programs import GenerationPrograms, PrefillShape
from shmap_tp.inference.sampling import NO_TOKEN, Filters, Sampling
from shmap_tp.model.transformer import Transformer

PADDING = -1
"""Id of a slot before the first token of a prompt."""
SLOTS_MULTIPLE = 32
"""Prompts and caches are padded to a multiple of this, so that similar lengths share one program."""

SMALLEST, LARGEST = 1e-6, 1e6
"""Temperatures and repetition penalties with which logits stay finite, and apart from each other, in float32."""
MAX_SAMPLES = 65536
"""Sequences of each prompt, which are computed at the same time."""


def option(default: int | float, **rules: Any) -> Any:
    """A field of this default, whose value has rules, which `config/values.py` explains."""
    return field(default=default, metadata=rules)


@dataclass(frozen=True)
class Options:
    """How to generate.  Raises UserError for values out of range."""

    max_new_tokens: int = 64
    temperature: float = option(0.0, zero_is_null=True, least=SMALLEST, most=LARGEST, usual="0 (greedy), or 0.8,")
    """0 is greedy: the most likely token."""
    top_k: int = option(0, least=0)
    """Sample from the k most likely tokens; 0 is all."""
    top_p: float = option(1.0, above=0, most=1)
    """Sample from the most likely tokens that together have this probability."""
    repetition_penalty: float = option(1.0, least=SMALLEST, most=LARGEST)
    """Makes tokens that occur in prompt or answer less likely, but for stop tokens; 1 is none."""
    seed: int = option(0, least=0)
    stop_tokens: tuple[int, ...] = ()
    """Ids that end a sequence; the stop token itself is left out of the result."""
    vocabulary: int = 2**31 - 1
    """Ids from it on have no token, and are never drawn: tables of weights are often longer than their tokenizer's."""
    samples: int = option(1, below=MAX_SAMPLES + 1)
    """Sequences of each prompt, with noise of their own."""
    decode_tokens: int = 16
    """Tokens between two looks at whether all sequences have ended."""

    def __post_init__(self) -> None:
        refuse_first(self._faults())

    def _faults(self) -> Iterator[str]:
        for name, kind, value, rules in ((f.name, f.type, getattr(self, f.name), f.metadata) for f in fields(self)):
            if kind in (int, float):
                if not (is_integer(value) or (kind is float and isinstance(value, float | np.floating))):
                    yield f"{name}={shown(value)} must be {'an integer' if kind is int else 'a number'}"
                yield from faults_of_number(name, kind(value), rules)
        stop = self.stop_tokens
        if isinstance(stop, str) or not np.ndim(stop) or not all(map(is_integer, stop)):
            yield f"stop_tokens={shown(stop)} must be token ids, for example (0,)"

    @property
    def filters(self) -> Filters:
        """What the compiled programs contain for these options."""
        noise = self.temperature > 0
        return Filters(noise, noise and (self.top_k > 0 or self.top_p < 1), self.repetition_penalty != 1)

    @property
    def sampling(self) -> Sampling:
        """The values that the compiled programs take."""
        real, whole = partial(np.array, dtype=np.float32), partial(np.array, dtype=np.int32)
        exempt = [token for token in self.stop_tokens if 0 <= token < 2**31] if self.filters.penalty else []
        chosen = {name: real(getattr(self, name)) for name in ("temperature", "top_p", "repetition_penalty")}
        chosen |= {name: whole(getattr(self, name)) for name in ("top_k", "seed", "vocabulary")}
        return Sampling(exempt=whole(exempt), **chosen)


def is_integer(value: object) -> bool:
    """Whether `value` is an integer of Python, NumPy or JAX, and no bool."""
    try:
        index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def generate(
    programs: GenerationPrograms, params: Transformer, prompts: Sequence[Sequence[int]], options: Options
) -> list[list[int]]:
    """The new ids of each prompt, or of its `options.samples` sequences one after the other; prompts, padding and stop
    tokens are left out.  Fewer than max_new_tokens are returned where the context of the model ends.

    Raises UserError as `stream` does.
    """
    pieces = list(stream(programs, params, prompts, options))
    return [[token for piece in pieces for token in piece[row]] for row in range(len(pieces[0]))]


def stream(
    programs: GenerationPrograms,
    params: Transformer,
    prompts: Sequence[Sequence[int]],
    options: Options,
    requests: Sequence[int] | None = None,
    ended: Container[int] = (),
) -> Iterator[list[list[int]]]:
    """As `generate`, but yields the next ids of every sequence as they come, options.decode_tokens at a time.

    `requests` are the numbers of the prompts, on which sampling depends; by default 0, 1, 2 ...  `ended` has the
    numbers of the sequences whose next ids the caller no longer wants; it is read before each decode call.
    Raises UserError if there is no prompt, or one is empty, has an id that is not below the vocabulary, or leaves no
    room for a new token in model.context; and where the logits of a new token are not finite.
    """
    check_prompts(prompts, programs.model)
    limits = [min(options.max_new_tokens, programs.model.context - len(prompt)) for prompt in prompts]
    pending = [_Sequence(limit, options.stop_tokens) for limit in limits for _ in range(options.samples)]
    calls = -(-(max(limits) - 1) // options.decode_tokens)
    rows, numbers = _padded(prompts, requests, programs.batch_ranks)
    slots = rows.shape[1] + calls * options.decode_tokens
    shape = PrefillShape(-(-slots // SLOTS_MULTIPLE) * SLOTS_MULTIPLE, options.samples)
    sampling, filters = options.sampling, options.filters
    new, progress = programs.prefill(params, sampling, rows, numbers, filters=filters, shape=shape)
    yield [sequence.take(ids) for sequence, ids in zip(pending, np.asarray(new), strict=False)]
    weights = programs.for_decoding(params, progress.cache) if calls else params
    for _ in range(calls):
        if all(sequence.ended or row in ended for row, sequence in enumerate(pending)):
            return
        new, progress = programs.decode(weights, sampling, progress, filters=filters, count=options.decode_tokens)
        yield [sequence.take(ids) for sequence, ids in zip(pending, np.asarray(new), strict=False)]


class _Sequence:
    """How many more tokens a sequence may have."""

    def __init__(self, limit: int, stop_tokens: Sequence[int]):
        self._left, self._stop_tokens = limit, frozenset(stop_tokens)

    @property
    def ended(self) -> bool:
        return self._left == 0

    def take(self, ids: np.ndarray) -> list[int]:
        """The next ids, as far as they belong to the sequence.  Raises UserError if one's logits are not finite."""
        taken = []
        for token in ids[: self._left].tolist():
            if token == NO_TOKEN:
                raise UserError(
                    "a new token has logits that are infinite or NaN: the weights have such values, or overflow;\n"
                    "use other weights, for example an earlier checkpoint"
                )
            if token in self._stop_tokens:
                self._left = 0
                return taken
            taken.append(token)
        self._left -= len(taken)
        return taken


def _padded(prompts: Sequence[Sequence[int]], requests: Sequence[int] | None, dp: int) -> tuple[np.ndarray, np.ndarray]:
    """(prompts[B P] with padding on their left, their numbers[B]); prompts that only fill the batch have one token."""
    batch = -(-len(prompts) // dp) * dp
    length = -(-max(map(len, prompts)) // SLOTS_MULTIPLE) * SLOTS_MULTIPLE
    rows, numbers = np.full((batch, length), PADDING, np.int32), np.zeros(batch, np.int32)
    rows[:, -1] = 0
    for row, prompt in enumerate(prompts):
        rows[row, length - len(prompt) :] = prompt
    numbers[: len(prompts)] = range(len(prompts)) if requests is None else requests
    return rows, numbers


def check_prompts(prompts: Sequence[Sequence[int]], model: ModelConfig) -> None:
    """Raise UserError as `stream` does."""
    refuse_first(_faults_of_prompts(prompts, model))


def _faults_of_prompts(prompts: Sequence[Any], model: ModelConfig) -> Iterator[str]:
    if not len(prompts):
        yield "there is no prompt; give at least one"
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not np.ndim(prompt):
            yield f"prompt {number} must be a list of token ids, not {prompt!r}; encode text first"
        if not len(prompt):
            yield f"prompt {number} is empty; give at least one token"
        for token in prompt:
            if not is_integer(token):
                yield f"prompt {number} has {shown(token)}, which is not a token id; give integers"
        wrong = next((token for token in prompt if not 0 <= token < model.vocabulary), None)
        if wrong is not None:
            yield f"prompt {number} has token id {wrong}, but model.vocabulary={model.vocabulary}"
        if len(prompt) >= model.context:
            yield f"prompt {number} has {len(prompt)} tokens, and no room in model.context={model.context}; shorten it"
