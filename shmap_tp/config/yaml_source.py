"""Checks the YAML files of a configuration before Hydra reads them: plain values only, of a bounded size.

Hydra and OmegaConf would read anything: a file of any size, aliases that stand for more values than fit into memory,
values that contain themselves, tags that create Python objects.
"""

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from shmap_tp.config.packaged import as_installed
from shmap_tp.errors import UserError, shown

MAX_BYTES = 1 << 20
MAX_VALUES = 10_000
"""Values in a file, each alias counted as the values that it refers to."""
MAX_CHARACTERS = 3000
"""Characters of one key or value.  Python refuses to print integers of more than 4300 digits."""
MAX_DEPTH = 20
"""Lists and sections within each other."""


def read_text(file: Path, name: str) -> str:
    """The text of `file`, which messages call `name`.  Raises UserError if it is no regular file of UTF-8 text."""
    try:
        if not file.exists():
            raise UserError(f"{name}: no such file; {as_installed('start with conf/config.yaml')}")
        if not file.is_file():  # opening a FIFO would wait for a writer
            raise UserError(f"{name} is not a file; {as_installed('name a YAML file, for example conf/config.yaml')}")
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}; correct that, or name another file") from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{name} has more than {MAX_BYTES} bytes, which no configuration needs; name another file")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text ({error.reason}); save it as UTF-8") from error


@lru_cache(maxsize=256)  # the files of conf/ are read again for each configuration
def check_yaml(text: str, name: str) -> None:
    """Raise UserError unless `text`, of the file `name`, is YAML of plain values within the limits of this module.

    Looks at YAML's events, of which each alias is one: nothing is expanded.
    """
    with _yaml_errors(name):
        _check_events(yaml.parse(text, yaml.SafeLoader), name)


def _check_events(events: Iterable[yaml.Event], name: str) -> None:
    sizes, anchors, size_of = [0], [], {}
    for event in events:
        place = f"{name}, line {event.start_mark.line + 1}"
        is_value = isinstance(event, yaml.NodeEvent)
        if is_value and sizes == [0] and not isinstance(event, yaml.MappingStartEvent):
            raise UserError(
                f"{place}: it holds no sections with keys; {as_installed('begin as conf/config.yaml does')}"
            )
        if getattr(event, "tag", None):
            tag = shown(event.tag.replace("tag:yaml.org,2002:", "!!"))
            raise UserError(f"{place}: the YAML tag {tag} is not allowed; write the value without it")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in size_of:
                why = "contains itself" if event.anchor in anchors else "is not defined before"
                raise UserError(f"{place}: the YAML alias *{shown(event.anchor)} {why}; write the value in its place")
            sizes[-1] += size_of[event.anchor]
        elif isinstance(event, yaml.CollectionStartEvent):
            sizes.append(1)
            anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            size = sizes.pop()
            size_of[anchors.pop()] = size
            sizes[-1] += size
        elif isinstance(event, yaml.ScalarEvent):
            sizes[-1] += 1
            size_of[event.anchor] = 1
            if len(event.value) > MAX_CHARACTERS:
                raise UserError(f"{place}: a value of more than {MAX_CHARACTERS} characters; shorten it")
        if len(anchors) > MAX_DEPTH:
            raise UserError(f"{place}: more than {MAX_DEPTH} lists or sections within each other; remove some")
        if sizes[-1] > MAX_VALUES:
            raise UserError(f"{place}: more than {MAX_VALUES} values, aliases included; remove some")


def saved_value(file: Any, key: str) -> Any:
    """The value of `key` in `file`, the config.yaml of a run (a Path, or an epath.Path of a bucket).

    Read without validation: a file of an earlier version may lack keys.  None if there is none, or if the file is not a
    configuration.
    """
    try:
        text = read_text(file, str(file))
        check_yaml(text, str(file))
        saved = yaml.safe_load(text)
    except (UserError, yaml.YAMLError, ValueError):
        return None
    for part in key.split("."):
        saved = saved.get(part) if isinstance(saved, dict) else None
    return saved


LONGEST_NAME = 255 - len(".yaml")
"""Bytes of the name of an option: the file systems of Linux have names of up to 255."""


def check_files(main: Path, directories: Sequence[Path], chosen: Mapping[str, str]) -> None:
    """Check the file `main`, and those that its defaults list and theirs name, as Hydra finds them in `directories`.

    `chosen` are the options of the command line, by group.  Raises UserError for a file that is not plain YAML, has
    settings of Hydra, or has a defaults list that does not name one option of each group.
    """
    unchecked, checked = [(main, "")], set()
    while unchecked:
        file, group = unchecked.pop(0)
        name = shown(os.path.realpath(file))
        place = name, *(os.path.realpath(directory / group) for directory in directories)
        if place in checked:  # files that name each other
            continue
        checked.add(place)
        text = read_text(file, name)
        check_yaml(text, name)
        with _yaml_errors(name):
            content = _content(text)
        for option, group_of_option in _defaults(content, group, chosen, name):
            option = option if option.endswith(".yaml") else f"{option}.yaml"
            found = (directory / option for directory in directories if (directory / option).is_file())
            unchecked += [(path, group_of_option) for path in found][:1]  # Hydra explains that there is none


@lru_cache(maxsize=256)
def _content(text: str) -> Any:
    return OmegaConf.load(io.StringIO(text))


def _defaults(content: Any, group: str, chosen: Mapping[str, str], file: str) -> Iterator[tuple[str, str]]:
    """(option, its group) of what the defaults list of `content`, a file of `group`, names: (model/bytes, model).

    Raises UserError if the file has settings of Hydra, or its defaults list does not name one option of each group.
    """
    if "hydra" in content:
        raise UserError(f"{file}: hydra: settings of Hydra itself have no effect here; remove them")
    defaults = OmegaConf.to_container(content).get("defaults", [])
    if not isinstance(defaults, list):
        raise UserError(f"{file}: defaults must be a list, such as [model: bytes, data: stdlib, _self_]")
    for item in defaults:
        (key, name), *more = item.items() if isinstance(item, dict) and item else [(item, "")]
        if more or not isinstance(key, str) or not isinstance(name, str) or not key.strip() or "${" in key + name:
            raise UserError(
                f"{file}: defaults has {shown(item)}; write each item as GROUP: NAME, for example model: bytes"
            )
        if any(len(os.fsencode(part)) > LONGEST_NAME for part in f"{key}/{name}".split("/")):
            raise UserError(f"{file}: defaults has {shown(item)}, longer than the name of a file can be; correct it")
        if "hydra/" in key:
            raise UserError(f"{file}: defaults has {shown(key)}: settings of Hydra have no effect here; remove it")
        key = (key.split(" ")[-1] if isinstance(item, dict) else key).partition("@")[0]  # of `optional GROUP@PACKAGE`
        path = key[1:] if key.startswith("/") else os.path.join(group, key)
        if isinstance(item, dict):
            yield f"{path}/{chosen.get(path, name)}", path
        elif item != "_self_":
            yield path, os.path.dirname(path)


@contextmanager
def _yaml_errors(name: str) -> Iterator[None]:
    """Context in which errors of the YAML reader become UserErrors about the file `name`."""
    try:
        yield
    except UserError:
        raise
    except yaml.reader.ReaderError as error:
        raise UserError(f"{name}: not UTF-8 text ({error.reason}); save it as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(
            f"{name}, line {mark.line + 1}: invalid YAML, {shown(error.problem)}; correct that line or the one before"
        ) from error
    except ValueError as error:  # such as of a number with thousands of digits
        raise UserError(f"{name}: {shown(str(error).splitlines()[0])}; correct that value") from error
