"""All text of the project uses the words of the field: none of an earlier private vocabulary is left."""

import re
from pathlib import Path

import pytest

from tests.helpers.documents import DOCUMENTS, ROOT, name_of

NOT_IN_A_WORD = r"(?<![A-Za-z])(?:{})(?![A-Za-z])"
"""Also matches parts of identifiers, such as wire in `wire_bytes`."""

PRIVATE_WORDS = {
    "wires?": "tensor-parallel mode, communication, or link",
    "twins?": "baseline, GSPMD baseline",
    "windows|window of tokens|training window": "sequences",
    "doors?": "command line, entry point; or leave it out",
    "owed": "partial sum, not yet reduced",
    "heed(?:s|ed)?": "handle, respond to",
    "told": "reported, requested, or given",
    "handed": "passed, returned",
    "(?:at|go|goes|going|gone|send|sends|sent)[ _]home": "local; gradients are reduced",
    "who keeps": "how it is sharded",
    "parts? of dp": "dp ranks",
    "put[ _]off": "deferred, saved at the end of the block",
    "by[ _]adding": "sum by additions",
    "(?:go|goes|going)[ _]around": "ring reduction",
    "(?:share|shares|shared)[ _]out": "shard over dp",
    "cut[ _]further|cut along|cuts along": "sharded over, split along",
    "meets?|meeting": "are reduced; communicate; connect",
    "travels?|travelling": "is communicated, is sent",
    "the way (?:back|through)": "backward pass; scan over layers",
    "nothing hides": "exposed communication",
    "the host keeps|kept by the host": "offloaded to host memory",
    "doctor": "verify",
    "settled": "resolve_auto",
    "everyone(?:'s)?": "Replicated; replicated over dp",
    "InputError": "UserError",
    "AnyWire|SharedUpdate|SharedWeight|RingWeight|DpParts": "the present class names",
    "meet_over|owed_by|scatter_sum|gather_whole|own_part|scored_by|dp_meets": "the present function names",
}
"""Words of an earlier private vocabulary, and the field's words for them."""

PATTERNS = {
    re.compile(NOT_IN_A_WORD.format(words), re.IGNORECASE): standard for words, standard in PRIVATE_WORDS.items()
}

NAMES_OF_LIBRARIES = ["get_rolling_token_windows"]
"""Names that other libraries chose, here lm_eval."""

TEXTS = [
    *(ROOT / "shmap_tp").rglob("*.py"),
    *(file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__).resolve()),
    *(ROOT / "benchmarks").glob("*.py"),
    *(ROOT / "conf").rglob("*.yaml"),
    *(ROOT / "scripts").glob("*.sh"),
    *(ROOT / "docs").rglob("*.py"),
    *ROOT.glob("*.py"),
    *ROOT.glob("*.sh"),
    *DOCUMENTS,
]

INVERTED = {
    r"\bOf\b": "begin the sentence with its subject",
    r'"{3}(?:Those|That) (?!a |the )': "name what it is: a docstring that begins so has no noun",
}
"""Beginnings of sentences that make a reader wait for the subject, and what to do instead."""


def without_names_of_libraries(text: str) -> str:
    for name in NAMES_OF_LIBRARIES:
        text = text.replace(name, "")
    return text


def test_texts_use_the_words_of_the_field():
    found = []
    for file in sorted(TEXTS):
        text = without_names_of_libraries(file.read_text())
        for pattern, standard in PATTERNS.items():
            for match in pattern.finditer(text):
                number = text.count("\n", 0, match.start()) + 1
                found.append(f"{name_of(file)}:{number}: {match[0]!r} (use: {standard})")
    assert not found, "\n" + "\n".join(found)


def inverted(text: str) -> list[tuple[int, str]]:
    """(line, what to do instead) of every sentence of `text` that begins as no sentence of this project does."""
    found = [(match.start(), instead) for begins, instead in INVERTED.items() for match in re.finditer(begins, text)]
    return sorted((text.count("\n", 0, start) + 1, instead) for start, instead in found)


def test_sentences_begin_with_their_subject():
    files = sorted({*TEXTS, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "RESULTS.md"})
    found = [f"{name_of(file)}:{line}: {instead}" for file in files for line, instead in inverted(file.read_text())]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text, accepted",
    [
        ('"""Of a step."""', False),
        ("are fast.  Of these\nnone", False),
        ("| Of the 3 s", False),
        ('"""Those of the model."""', False),
        ('"""That the step is good is decided."""', True),
        ("the sum of all; those of the model", True),
    ],
)
def test_the_check_of_sentences_finds_those_that_begin_without_a_subject(text, accepted):
    assert accepted is not bool(inverted(text))


@pytest.mark.parametrize(
    "line, accepted",
    [
        ("the wire that is handed down", False),
        ("gradients go home", False),
        ("self.at_home", False),
        ("bytes_on_wires = 3", False),
        ("a wireless window", True),
        ("guard.window steps; the gradient is reduced", True),
    ],
)
def test_the_word_check_finds_private_words_and_no_others(line, accepted):
    assert accepted is not any(pattern.search(line) for pattern in PATTERNS)
