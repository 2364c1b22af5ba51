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
    "replay(?:s|ed|ing)?": "simulation of the schedule",
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
