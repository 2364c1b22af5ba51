"""Conversations as training data: read from files, rendered by a chat template, tokenized, with a mark on each token.

The loss counts what the model would have to write: each assistant turn that follows another message, to the end token
that the template puts after it.  Where the template has {% generation %}, that says what a turn is; else it is what the
turn adds to the prompt that generation would have had.  A token that does not count stands as -1 - id, as in a batch
(`layers/context.py`).

Some templates write earlier turns in another way than the last one: those of thinking models leave out what was thought
before.  Then the whole conversation holds turns that the model never writes, so each of its assistant turns becomes a
sample of its own, as it is written when it is the last one.

Each answer follows the prompt that generation would have, character by character and token by token.  Where that prompt
ends with more than the template writes before an answer later, such as an empty part of thinking, the answer is put
behind it.  Where a token would span the end of the prompt, the text is tokenized apart there.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int32
from tqdm import tqdm

from shmap_tp.data.chat_template import ChatTemplate, Span
from shmap_tp.data.messages import ASSISTANT, Conversation, conversation, pair
from shmap_tp.data.metadata import CONFIG, GENERATION, TEMPLATE, TOKENIZER
from shmap_tp.data.subwords import Subwords, quoted
from shmap_tp.data.text_directory import TextDirectory
from shmap_tp.data.text_sources import TRAIN, VALIDATION
from shmap_tp.data.tokenizer import END_OF_TEXT, Bytes, check_text
from shmap_tp.errors import UserError, shown
from shmap_tp.runtime.console import write_line

MOST_EQUAL = 0.1
"""The share of preference pairs that may have equal answers."""
EMPTY_PARTS = re.compile(r"(?:<(\w+)>\s*</\1>\s*)+$")
"""What templates end the prompt with where a model is not to think."""


@dataclass(frozen=True)
class Sample:
    """A text that is trained on, and the parts of it that count."""

    text: str
    answers: list[Span]
    ended: bool
    """Whether the template ends the last answer with a token; else the end of the sample is its end."""


def samples_of(given: Conversation, template: ChatTemplate, ends: re.Pattern[str]) -> list[Sample]:
    """What is trained on of a conversation: one sample, or one for each assistant turn after its prompt (see above).

    `ends` matches the tokens that may end a turn.  Raises UserError if the template refuses the messages, or an answer
    in its text does not follow the prompt to which it is the answer.
    """
    turns = [number for number, each in enumerate(given.messages) if each["role"] == ASSISTANT]
    with errors_at(given.place):
        each = [_answer(given, turn, template, ends) for turn in turns if turn >= given.prompt]
    whole = each[-1]
    if all(turn.ended for turn in each[:-1]) and all(whole.text.startswith(turn.text) for turn in each):
        return [Sample(whole.text, [span for turn in each for span in turn.answers], whole.ended)]
    return each


def _answer(given: Conversation, turn: int, template: ChatTemplate, ends: re.Pattern[str]) -> Sample:
    """The conversation up to an assistant turn, which alone counts."""
    asked, _ = template.render_marked(given.messages[:turn], given.tools, asks=True)
    text, marked = template.render_marked(given.messages[: turn + 1], given.tools)
    if not text.startswith(asked):
        text, marked = _behind(asked, text, marked, turn)
    spans = [span for span in marked if span[0] >= len(asked)]
    *before, (first, last) = spans or [(len(asked), len(text))]
    stop = _end_token(text, first, last, ends)
    message = given.messages[turn]
    says_something = (message["content"] or "").strip() or message.get("tool_calls")
    if says_something and not any(text[a:b].strip() for a, b in [*before, (first, last)]):
        raise UserError(f"the chat template does not write the answer {turn}; give another: --template FILE")
    return Sample(text, [*before, (first, stop or last)], stop is not None)


def _behind(asked: str, text: str, marked: list[Span], turn: int) -> tuple[str, list[Span]]:
    """The answer of `text` and its marks, put behind the prompt `asked`, which ends with empty parts of thinking that
    the template does not write before an answer.  Raises UserError if that is not how both differ."""
    empty = EMPTY_PARTS.search(asked)
    begin = empty.start() if empty else len(asked)
    if empty and text.startswith(asked[:begin]) and not text.startswith(f"<{empty[1]}>", begin):
        more = len(asked) - begin
        return asked + text[begin:], [(first + more, last + more) for first, last in marked if first >= begin]
    pairs = enumerate(zip(asked, text, strict=False))
    same = next((place for place, (a, b) in pairs if a != b), min(len(asked), len(text)))
    raise UserError(
        f"the chat template writes the answer {turn} after another text than generation would have: "
        f"{shown(text[same : same + 40])} instead of {shown(asked[same : same + 40])};\ngive another template, or "
        f"other values of its variables, such as --template-argument enable_thinking=false"
    )


def _end_token(text: str, first: int, last: int, ends: re.Pattern[str]) -> int | None:
    """The end of the token that ends the answer text[first:last], within it or after it; None if there is none."""
    inside = (found for found in ends.finditer(text, first, last) if not text[found.end() : last].strip())
    found = next(inside, None) or ends.match(text, last)
    return found.end() if found else None


def marked_tokens(sample: Sample, ids: np.ndarray, places: np.ndarray, end_of_text: int) -> Int32[np.ndarray, " _"]:
    """The ids of a sample and its end of text, those that do not count as -1 - id.

    places[2, tokens] are the first character of each token and the one after its last.  A token that is only partly in
    an answer counts.
    """
    counted = np.zeros(len(ids) + 1, bool)
    for first, last in sample.answers:
        counted[:-1] |= (places[1] > first) & (places[0] < last)
    counted[-1] = not sample.ended
    ids = np.append(ids, end_of_text).astype(np.int32)
    return np.where(counted, ids, ~ids)


@dataclass
class ChatSource:
    """Conversations or preference pairs of files, tokenized and marked, each assigned to a split as a whole."""

    name: str
    rows: Callable[[], Iterator[tuple[str, Any]]]
    """Yields (place, record) of each conversation."""
    template: ChatTemplate
    text: TextDirectory
    """The other files of the template's model."""
    validation: float
    """The fraction of the records, at least one, that is for validation: those with the lowest hashes."""
    row: int
    """Documents of more tokens are refused."""
    cut: bool
    """Or each of their samples loses what exceeds its equal share of `row`."""
    pairs: bool = False
    """The records are preference pairs."""
    special_tokens_in_text: bool = False
    """Names of special tokens in contents are these tokens."""
    marked, files = True, None

    def __post_init__(self):
        self._records_name = "preference pairs" if self.pairs else "conversations"
        self._long: list[tuple[str, int]] = []  # (where, tokens) of documents that are too long
        self._empty = 0  # of these, how many lack an answer once they are cut
        self._special = list[int]()
        self._apart = 0  # samples that are tokenized apart before an answer
        self._equal = self._records = 0  # pairs with equal answers, of so many records
        self._end_tokens: set[int] = set()

    def tokenized(self, tokenizer: Bytes | Subwords) -> Iterator[tuple[str, Int32[np.ndarray, " _"]]]:
        """(split, tokens) of each document: its samples, each to its end of text.  Raises UserError as `samples_of`
        does, if a document is too long, or a sample contains the end of text."""
        hashes = sorted({_hash(row) for _, row in self.rows()})
        if len(hashes) < 2:
            raise UserError(f"{self.name}: {len(hashes)} different {self._records_name}; both splits need some")
        limit = hashes[min(max(round(self.validation * len(hashes)), 1), len(hashes) - 1)]
        special = tokenizer.special_tokens()
        self._special = [*special.values()]
        ends = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        for place, row in tqdm(self.rows(), desc=self.name, unit=f" {self._records_name}", disable=None):
            split = VALIDATION if _hash(row) < limit else TRAIN
            given = (pair(row, place) or ()) if self.pairs else [conversation(row, place)]
            if not self.special_tokens_in_text:  # of texts that are joined and decoded, else a part of a name escapes
                with errors_at(place):
                    given = [
                        replace(each, messages=quoted(each.messages, special), tools=quoted(each.tools, special))
                        for each in given
                    ]
            documents = self._documents(given, ends)
            self._equal, self._records = self._equal + (not documents), self._records + 1
            for document in documents:
                parts = [self._tokens(sample, tokenizer, ends, place) for sample in document]
                parts = self._fitted(parts, place)
                if all((part >= 0).any() for part in parts):
                    yield split, np.concatenate(parts)
        self._report()

    def _documents(self, given: Sequence[Conversation], ends: re.Pattern[str]) -> list[list[Sample]]:
        """The documents of a record, each of one sample, or of the two of a pair; none of a pair of equal answers."""
        each = [samples_of(one, self.template, ends) for one in given]
        if not self.pairs:
            return [[sample] for samples in each for sample in samples]
        if several := [one.place for one, samples in zip(given, each, strict=True) if len(samples) > 1]:
            raise UserError(
                f"{several[0]}: an answer has several assistant turns, which the chat template ends with no special "
                f"token, or writes in another way than the last;\nput those before the last one into the prompt"
            )
        return [[sample for (sample,) in each]] if each else []

    def _tokens(self, sample: Sample, tokenizer: Bytes | Subwords, ends: re.Pattern[str], place: str) -> np.ndarray:
        check_text(sample.text, place)
        ids, places = self._encoded(sample.text, sample.answers, tokenizer, ends)
        if (ids == tokenizer.end_of_text).any():
            raise UserError(
                f"{place}: {tokenizer.decode([tokenizer.end_of_text])!r} is to end a conversation in the data, but it "
                f"is within this one; name a token that is in none with --end-of-text"
            )
        ends_answer = np.isin(places[1], [last for _, last in sample.answers])
        self._end_tokens |= {*ids[ends_answer & np.isin(ids, self._special)].tolist()}
        return marked_tokens(sample, ids, places, tokenizer.end_of_text)

    def _encoded(
        self, text: str, answers: list[Span], tokenizer: Bytes | Subwords, ends: re.Pattern[str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a text and their places (`encode_with_places`), in which each answer begins a token, and those
        before it are the ids of its prompt alone.

        Special tokens divide a text, so it is enough to compare what follows the last one before an answer.
        """
        ids, places = tokenizer.encode_with_places(text)
        cuts = [0]
        for first, _ in answers:
            start = max((found.start() for found in ends.finditer(text, cuts[-1], first)), default=cuts[-1])
            prompt, _ = tokenizer.encode_with_places(text[start:first])
            before = (places[0] >= start) & (places[0] < first)
            if first > cuts[-1] and not np.array_equal(ids[before], prompt):
                cuts.append(first)
        if len(cuts) == 1:
            return ids, places
        self._apart += 1
        lead = next(iter(tokenizer.special_tokens()), "")  # so that no part but the first begins a text
        parts = []
        for first, last in zip(cuts, [*cuts[1:], len(text)], strict=True):
            before = lead if first else ""
            ids, places = tokenizer.encode_with_places(before + text[first:last])
            parts.append(np.stack([ids, *(places + first - len(before))])[:, bool(before) :])
        whole = np.concatenate(parts, axis=1)
        return whole[0], whole[1:]

    def _fitted(self, parts: list[np.ndarray], place: str) -> list[np.ndarray]:
        """The samples of a document, without their ends if it is too long."""
        if (size := sum(map(len, parts))) <= self.row:
            return parts
        self._long.append((place, size))
        share = self.row // len(parts)
        cut = [part if len(part) <= share else np.append(part[: share - 1], min(part[-1], ~part[-1])) for part in parts]
        self._empty += not all((part >= 0).any() for part in cut)
        return cut

    def _report(self) -> None:
        """Refuse documents that are too long or many equal pairs, or say how many were cut or left out."""
        if self._equal:
            what = f"{self._equal} of {self._records} {self._records_name} have equal answers"
            if self._equal > MOST_EQUAL * self._records:
                raise UserError(f"{what}: more than {MOST_EQUAL:.0%}; look at how they were made, and leave them out")
            write_line(f"{what}: they are left out")
        if self._apart:
            write_line(f"{self._apart} samples: tokenized apart where a token would span a prompt and its answer")
        if not self._long:
            return
        place, size = self._long[0]
        name = "pair" if self.pairs else "sample"
        are = f"{name}s are" if len(self._long) > 1 else f"{name} is"
        what = f"{len(self._long)} {are} longer than --pack {self.row} tokens; the first, {place}, has {size}"
        if not self.cut:
            raise UserError(f"{what};\nuse a larger --pack, shorten them, or cut their ends: --cut")
        write_line(f"{what}: their ends are cut, and {self._empty} that have no answer then are left out")

    @property
    def rendering(self) -> dict[str, Any]:
        """How records became texts, for meta.json."""
        template = self.template
        return {
            "template_arguments": template.arguments,
            "date": template.day.isoformat() if template.has_clock and template.day else None,
            "special_tokens_in_text": self.special_tokens_in_text,
        }

    def companions(self, tokenizer: Bytes | Subwords) -> dict[str, bytes]:
        """The tokenizer, the template, and what generation stops at, in the files of a Hugging Face directory."""
        found = {name: self.text.files[name] for name in (CONFIG, GENERATION) if name in self.text.files}
        if self._end_tokens:
            generation = self.text.values(GENERATION)
            generation["eos_token_id"] = sorted(self.text.ends(GENERATION) | self._end_tokens)
            found[GENERATION] = json.dumps(generation, indent=2).encode() + b"\n"
        own = {} if tokenizer.json is None else {TOKENIZER: tokenizer.json}
        return found | {TEMPLATE: self.template.text.encode()} | own


def end_of_conversations(tokenizer: Bytes | Subwords, template: ChatTemplate) -> int:
    """The id that separates conversations in the data: the tokenizer's end of text, unless the template ends a turn
    with it; then another special token that the template does not write.  Raises UserError if there is none.

    What it is does not matter to the model: no other token sees it, and it counts only where nothing else ends a turn.
    """
    said = [{"role": role, "content": "a"} for role in ("user", ASSISTANT, "user", ASSISTANT)]
    written = {*tokenizer.encode(template.render_marked(said)[0], special_tokens=False)}
    special = tokenizer.special_tokens()
    for candidate in (tokenizer.end_of_text, special.get(END_OF_TEXT), *special.values()):
        if candidate is not None and candidate not in written:
            return candidate
    raise UserError(f"--tokenizer {tokenizer.name}: no special token separates conversations; give --end-of-text")


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Context of what was read at `place`, which its UserErrors then name."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def _hash(row: Any) -> int:
    """A hash of a record, which in a table may have dates and the like."""
    content = json.dumps(row, sort_keys=True, default=str).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
