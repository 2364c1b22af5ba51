"""The messages of configurations that are refused."""

from pathlib import Path

import pytest

from shmap_tp.config.compose import load
from shmap_tp.errors import UserError


def error_message(file: str | Path, *overrides: str) -> str:
    """The message, of one or two lines, of the UserError that loading raises."""
    with pytest.raises(UserError) as caught:
        load(str(file), list(overrides))
    message = str(caught.value)
    assert len(message.splitlines()) <= 2, message
    return message
