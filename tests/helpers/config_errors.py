"""The messages of configurations that are refused."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from shmap_tp.config.compose import CONF, from_values, load, to_dict
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import validate
from shmap_tp.errors import UserError

FIRST = str(CONF / "base.yaml")


def refusal(action: Callable[..., object], *arguments: object) -> str:
    """The message, of one or two lines, of the UserError that `action(*arguments)` raises; "accepted" without one."""
    try:
        action(*arguments)
    except UserError as error:
        assert len(str(error).splitlines()) <= 2, error
        return str(error)
    return "accepted"


def error_message(file: str | Path, *overrides: str) -> str:
    """The refusal of a file with overrides, as the commands load it."""
    return refusal(load, str(file), list(overrides))


@cache
def composed() -> Config:
    """conf/base.yaml, which Hydra composes in a tenth of a second."""
    return load(FIRST, [])


@cache
def plain() -> DictConfig:
    """Its values, without types."""
    return OmegaConf.create(to_dict(composed()))


def wrong_value(*overrides: str) -> str:
    """As `error_message` of conf/base.yaml, without Hydra: for what the schema refuses.  A third of the time."""
    values = OmegaConf.merge(plain(), OmegaConf.from_dotlist(list(overrides)))
    return refusal(lambda: validate(from_values(values, FIRST, overrides)))


def with_values(*overrides: str) -> Config:
    """conf/base.yaml with values of the types of their keys, without Hydra and without validation.  Takes 5 ms."""
    dots = OmegaConf.from_dotlist(list(overrides))
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(composed()), dots))


def broken_rule(*overrides: str) -> str:
    """As `wrong_value`, of values that have the types of their keys: for the rules of `validate`."""
    return refusal(validate, with_values(*overrides))


def check_messages(message: Callable[..., str], words: Mapping[str, str], *more: str, apart: str | None = " ") -> None:
    """Assert that the message about each row, overrides with `apart` between them, has the row's words.  `more`
    overrides come before them."""
    found = {row: message(*more, *(row.split(apart) if apart else [row])) for row in words}
    wrong = {row: text for row, text in found.items() if words[row] not in text}
    assert not wrong, wrong
