"""A model for lm-evaluation-harness: `lm_eval.simple_evaluate(model=HarnessModel(model), tasks=[...])`.

https://github.com/EleutherAI/lm-evaluation-harness.  Importing this module needs `pip install -e '.[evaluate]'`.
"""

import difflib
import fnmatch
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from shmap_tp.data.chat_template import ChatTemplate, Message
from shmap_tp.data.tokenizer import Tokenizer
from shmap_tp.errors import UserError, first_line
from shmap_tp.inference.generator import Options
from shmap_tp.inference.scoring import POSITIONS_MULTIPLE, LengthBatch, length_batches
from shmap_tp.inference.text import answers, tokenizer_of_model

NEW_TOKENS = 256
"""Tokens of an answer where a task names no other number, as in lm_eval's own models."""
NAMES_OF_MAX_NEW_TOKENS = "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""(context and continuation as text, the ids of the context, the ids of the continuation)."""


class HarnessModel(TemplateLM):
    """An `api.Model` as lm-evaluation-harness calls it.

    Requests are sorted by length and computed `batch` at a time; at most a tenth of a batch is padding (on
    accelerators, whose attention kernels need it, lengths are multiples of 128, and there can be more).  The longest
    input is model.context: a longer one loses its beginning, as with lm_eval's own models.
    """

    def __init__(
        self, model: Any, tokenizer: Tokenizer | None = None, batch: int = 16, template: ChatTemplate | None = None
    ):
        """For an `api.Model`; `tokenizer` is by default that of its checkpoint or Hugging Face directory.

        `template` is what `simple_evaluate(apply_chat_template=True)` needs (`TextDirectory.template`).
        Raises UserError if the tokenizer is not found.
        """
        super().__init__()
        self._model, self._batch, self._template = model, batch, template
        self._tokenizer = tokenizer_of_model(model, None) if tokenizer is None else tokenizer
        self._multiple = 1 if model.mesh.devices.flat[0].platform == "cpu" else POSITIONS_MULTIPLE

    @property
    def max_length(self) -> int:
        """The longest input."""
        return self._model.config.model.context

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text.  Raises UserError if the tokenizer has none."""
        ends = self._tokenizer.end_of_text, *self._tokenizer.stop_tokens
        found = next((token for token in ends if token is not None), None)
        if found is None:
            raise UserError("the tokenizer names no end of text, which evaluation needs as the first token of a text")
        return found

    @property
    def prefix_token_id(self) -> int:
        """The id before a text that has no context."""
        begin = self._tokenizer.begin_of_text
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Identifies the tokenizer in caches of requests."""
        return self._tokenizer.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The text of the template, which lm_eval records; None where none is applied."""
        return self._template.text if chat_template and self._template else None

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        """The prompt of a task's messages.  Raises UserError if there is no template, or it refuses them."""
        if self._template is None:
            raise UserError("this HarnessModel has no chat template; give one as `template`")
        return self._template.render(chat_history, continued=not add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text; special tokens are added as in training unless it already begins with the first one."""
        begin = self._tokenizer.begin_of_text
        if add_special_tokens is None and begin is not None and string.startswith(self._tokenizer.decode([begin])):
            add_special_tokens = False
        return self._tokenizer.encode(string, special_tokens=add_special_tokens)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in nats; each token once, with as much context as fits.  The first token
        that a tokenizer adds is the context of the text, and not part of it."""
        scored: list[Scored] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            ids = ids[1:] if ids[:1] == [self.prefix_token_id] else ids
            pairs = []
            for first in range(0, len(ids), self.max_length):
                last = min(first + self.max_length, len(ids))
                context = ids[last - self.max_length - 1 : first] if first else [self.prefix_token_id]
                pairs.append((context, ids[first:last]))
            scored += [(None, context, continuation) for context, continuation in pairs]
            owners += [number] * len(pairs)
        sums = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self._loglikelihood_tokens(scored, disable_tqdm), strict=True):
            sums[owner] += nats
        for request, nats in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, nats)
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether it is the greedy one) of each continuation."""
        rows = [self._row(context, continuation) for _, context, continuation in requests]
        found: list[Any] = [None] * len(rows)

        def compute(batch: LengthBatch) -> None:
            tokens = np.zeros((len(batch.requests), batch.length + 1), np.int32)
            for row, number in zip(tokens, batch.requests, strict=True):
                row[: len(rows[number])] = rows[number]
            likelihood, greedy = self._model.scoring_program(self._model.parameters, tokens, multiple=self._multiple)
            for place, number in enumerate(batch.requests):
                text, _, continuation = requests[number]
                end = len(rows[number]) - 1
                part = np.s_[place, end - len(continuation) : end]
                found[number] = float(likelihood[part].sum(dtype=np.float64)), bool(greedy[part].all())
                if text is not None:
                    self.cache_hook.add_partial("loglikelihood", text, found[number])

        self._in_batches("log-likelihoods", [len(row) - 1 for row in rows], compute, disable_tqdm)
        return found

    def _row(self, context: list[int], continuation: list[int]) -> list[int]:
        """The ids that are computed for one request.  Raises UserError."""
        if not 0 < len(continuation) <= self.max_length:
            raise UserError(f"a continuation has {len(continuation)} tokens, not 1 to model.context={self.max_length}")
        row = [*context, *continuation][-(self.max_length + 1) :]
        if (largest := max(row)) >= (vocabulary := self._model.config.model.vocabulary):
            raise UserError(f"the tokenizer has id {largest}, but model.vocabulary={vocabulary}; give --tokenizer")
        return row

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to each prompt, which ends before the task's stop texts."""
        found = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        for numbers in groups.values():
            options, stop = _options(requests[numbers[0]].args[1])
            longest = self.max_length - options.max_new_tokens
            if longest < 1:
                new, context = options.max_new_tokens, self.max_length
                raise UserError(f"the task's {new} new tokens leave no room for a prompt in model.context={context}")
            prompts = [self.tok_encode(requests[number].args[0])[-longest:] for number in numbers]
            for number, text in zip(numbers, self._answers(prompts, numbers, options, stop, disable_tqdm), strict=True):
                found[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return found

    def _answers(
        self, prompts: list[list[int]], numbers: list[int], options: Options, stop: list[str], disable_tqdm: bool
    ) -> list[str]:
        """The answers to prompts that have the same options."""
        texts = [""] * len(prompts)
        prompts = [prompt or [self.prefix_token_id] for prompt in prompts]

        def compute(batch: LengthBatch) -> None:
            model = self._model
            part, requests = ([given[place] for place in batch.requests] for given in (prompts, numbers))
            programs = model.generation_programs, model.parameters
            answered = answers(*programs, self._tokenizer, part, options, stop=stop, requests=requests)
            for place, (text,) in zip(batch.requests, answered, strict=True):
                texts[place] = text

        self._in_batches("answers", [len(prompt) for prompt in prompts], compute, disable_tqdm)
        return texts

    def _in_batches(
        self, name: str, lengths: Sequence[int], compute: Callable[[LengthBatch], None], quiet: bool
    ) -> None:
        """`compute` of every batch, with a progress bar on process 0 where stderr is a terminal."""
        hidden = quiet or jax.process_index() > 0 or None
        with tqdm(total=len(lengths), desc=name, unit=" requests", disable=hidden) as bar:
            for batch in length_batches(lengths, self._batch, self._multiple):
                compute(batch._replace(length=min(batch.length, self.max_length)))
                bar.update(len(batch.requests))


def evaluate_tasks(model: HarnessModel, names: Sequence[str], include: str | None, **settings: Any) -> dict[str, Any]:
    """What `lm_eval.simple_evaluate` returns for these tasks: its own, or of the YAML files in the directory `include`.

    `settings` are its other arguments.  Each of several processes calls this and returns the same.
    Raises UserError if a task is not known, or its data cannot be loaded.
    """
    if include is not None and not Path(include).is_dir():
        raise UserError(f"--tasks-dir {include} is not a directory; name the one that holds the YAML files of tasks")
    manager = TaskManager(include_path=include)
    unknown = [name for name in names if not fnmatch.filter(manager.all_tasks, name)]
    if unknown:
        near = difflib.get_close_matches(unknown[0], manager.all_tasks)
        raise UserError(
            f"--tasks {unknown[0]}: lm_eval knows no such task{', but ' + ', '.join(near) if near else ''};\n"
            f"`lm-eval ls tasks` lists its own; name the directory of your YAML files with --tasks-dir"
        )
    try:
        manager.load([*names])
    except Exception as error:  # data sets are loaded by many libraries
        raise UserError(f"--tasks {','.join(names)} cannot be loaded: {first_line(error)}") from error
    return simple_evaluate(model, tasks=[*names], task_manager=manager, **settings)


def _options(arguments: dict[str, Any]) -> tuple[Options, list[str]]:
    """(how to answer, the stop texts) from the arguments of a task.  Raises UserError for one that is not supported."""
    given = dict(arguments)
    until = given.pop("until", None) or []
    counts = [count for name in NAMES_OF_MAX_NEW_TOKENS if (count := given.pop(name, None)) is not None]
    is_sampled, temperature = given.pop("do_sample", False), given.pop("temperature", 1.0)
    if given.get("num_beams") == 1:
        del given["num_beams"]
    filters = {name: given.pop(name) for name in ("top_k", "top_p", "repetition_penalty") if name in given}
    if given:
        raise UserError(f"the task's generation_kwargs have {', '.join(sorted(given))}, which is not supported here")
    options = Options(
        max_new_tokens=int(counts[0]) if counts else NEW_TOKENS,
        temperature=float(temperature) if is_sampled else 0.0,
        **filters,
    )
    return options, [text for text in ([until] if isinstance(until, str) else until) if text]
