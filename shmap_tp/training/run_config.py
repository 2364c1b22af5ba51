"""config.yaml of the run directory: the configuration of the newest start, as it was requested.

`--cfg RUN_DIRECTORY/config.yaml` loads it again.  What a start would overwrite is kept: a file of this program with
other values is copied to config.1.yaml, config.2.yaml, ...; a file of anybody else is refused.
"""

import itertools
import shutil
from pathlib import Path
from typing import Any

import yaml

from shmap_tp.config.compose import to_yaml
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.runtime.console import print_on_process_0
from shmap_tp.runtime.files import writing

HEADER = "# Written by shmap_tp at the start of the run in this directory, which will overwrite it."
"""First line of a config.yaml of this program."""
NOT_OF_THE_RUN = {"checkpoint.resume"}
"""Keys that say how to start, not what to train; a change of them alone is not reported."""
MAX_LISTED = 10


def refuse_foreign_config(directory: str) -> None:
    """Raise UserError if `directory` has a config.yaml that this program did not write."""
    file = Path(directory) / "config.yaml"
    try:
        with file.open("rb") as stream:
            if stream.readline().rstrip() == HEADER.encode():
                return
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; make it readable, or use another run.dir") from error
    raise UserError(
        f"run.dir={directory} has a config.yaml that was not written by a run, and that this one would overwrite;\n"
        f"use another run.dir, or rename the file"
    )


def write_run_config(config: Config, directory: Path) -> None:
    """Write config.yaml.  If it had other values, print the differences, and keep a copy."""
    file = directory / "config.yaml"
    with writing(file):
        new = directory / "config.yaml.new"
        new.write_text(f"{HEADER}\n{to_yaml(config)}", encoding="utf-8")
        if file.exists() and (changes := _changes(_values(file), _values(new))):
            number = next(n for n in itertools.count(1) if not (directory / f"config.{n}.yaml").exists())
            earlier = directory / f"config.{number}.yaml"
            shutil.copyfile(file, earlier)
            print_on_process_0(f"the configuration differs from that of the last start, which is now in {earlier}:")
            for line in changes[:MAX_LISTED]:
                print_on_process_0(f"  {line}")
            if len(changes) > MAX_LISTED:
                print_on_process_0(f"  and {len(changes) - MAX_LISTED} more")
        new.replace(file)


def _values(file: Path) -> dict[str, Any] | None:
    """The value of each key, such as train.steps; None if the file is damaged."""
    try:
        sections = yaml.safe_load(file.read_text())
        return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError, RecursionError):
        return None


def _changes(old: dict[str, Any] | None, new: dict[str, Any]) -> list[str]:
    """One line for each key whose value differs, "key: old -> new"."""
    if old is None:
        return ["the earlier file is damaged"]
    keys = [key for key in {**new, **old} if key not in NOT_OF_THE_RUN and old.get(key) != new.get(key)]
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys]
