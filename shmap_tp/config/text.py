"""Text of the user in messages of one or two lines."""

import unicodedata

LONGEST_SHOWN = 200


def shown(value: object) -> str:
    """`value` for a message: without control characters, and shortened where it is long."""
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print it in digits
        return f"an integer of {value.bit_length()} bits"
    text = "".join(f"\\x{ord(c):02x}" if has_control_characters(c) else c for c in str(value))
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 20]}... ({len(text)} characters)"


def has_control_characters(text: str) -> bool:
    """Whether `text` has line breaks, NULs, other control characters, or bytes that are not UTF-8."""
    return any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in text)


def is_unicode(text: str) -> bool:
    """Whether `text` can be encoded: it has no half of a surrogate pair, which stands for a byte that is not UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
