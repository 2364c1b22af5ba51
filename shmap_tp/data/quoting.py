"""Content that stays text: names of special tokens in what people wrote do not become these tokens.

A chat template puts control tokens and contents into one text, and a tokenizer cannot tell which of both a name such as
<|im_end|> is from.  So names in contents are quoted before they are rendered: a noncharacter of Unicode stands behind
their first character.  The tokenizer removes it, and reads the name as ordinary text.
"""

import json
import re
from collections.abc import Collection
from typing import Any

from shmap_tp.errors import UserError

QUOTE = "\ufdd2"


def quoted(value: Any, names: Collection[str]) -> Any:
    """`value`, a text or a nest of lists and objects, with each of `names` in its texts quoted.  Raises UserError if a
    text has the noncharacter already."""
    longest_first = sorted(names, key=len, reverse=True)

    def quote(value: Any) -> Any:
        if isinstance(value, str):
            if QUOTE in value:
                raise UserError("a text has the noncharacter U+FDD2 of Unicode, which stands for nothing; remove it")
            for name in longest_first:
                value = value.replace(name, name[0] + QUOTE + name[1:])
            return value
        if isinstance(value, list | tuple):
            return [quote(each) for each in value]
        if isinstance(value, dict):
            return {quote(key): quote(each) for key, each in value.items()}
        return value

    return quote(value)


def renamed_tokenizer(content: bytes) -> tuple[str, dict[str, str]]:
    """(a tokenizer.json in which the special tokens of `content` have names that occur in no text, these names)."""
    described = json.loads(content)
    special = [token for token in described.get("added_tokens") or [] if token["special"]]
    names = {token["content"]: f"\ufdd3{token['id']}\ufdd4" for token in special}
    for token in special:
        token["content"] = names[token["content"]]
    model = described["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(described, ensure_ascii=False), names


def renamed_text(text: str, names: dict[str, str]) -> tuple[str, list[int]]:
    """(`text` without quotes and with the names that are not quoted replaced, the place in `text` of each character and
    of the end)."""
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)"
    pieces, places, last = [], [], 0

    def add(until: int) -> None:
        kept = [place for place in range(last, until) if text[place] != QUOTE]
        pieces.extend(text[place] for place in kept)
        places.extend(kept)

    for found in re.finditer(f"(?:{pattern})(?!{QUOTE})", text):
        add(found.start())
        pieces.append(names[found[0]])
        places.extend([found.start()] * len(pieces[-1]))
        last = found.end()
    add(len(text))
    return "".join(pieces), [*places, len(text)]
