"""Where configuration files are: those of this project, and the config.yaml of a run.

The config.yaml of a run that was moved or copied is that of its new place.  It holds run.dir and checkpoint.dir as they
were at the start of the run.  Read in another place, they would name the directory that was copied, and a resume of the
copy would save there.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]
CONF = next(found for found in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if (found / "config.yaml").is_file())
"""The configuration directory of this project: shmap_tp/conf in an installed wheel, conf/ next to shmap_tp in a clone.
Files elsewhere can use its groups (model, data), too."""
IN_CLONE = CONF.parent != _PACKAGE
"""Whether there is a main.py, and conf/ beside it."""


def as_installed(text: str) -> str:
    """`text` for a user, who has main.py and conf/ in a clone only: elsewhere it names what is there instead."""
    if IN_CLONE:
        return text
    return text.replace("python main.py", "shmap-tp train").replace("conf/", f"{CONF}/")


HEADER = "# Written by shmap_tp at the start of the run in this directory, which will overwrite it."
"""First line of a config.yaml of this program."""
OF_A_RUN = "time.jsonl", "metrics.jsonl", "checkpoints"
"""One of these is beside the config.yaml of a run that has started."""


def saved_value(file: Any, key: str) -> Any:
    """The value of `key` in `file`, the config.yaml of a run (a Path, or an epath.Path of a bucket).

    Read without validation: a file of an earlier version may lack keys.  None if there is none, or if the file is not a
    configuration.
    """
    saved = _saved(file)
    for part in key.split("."):
        saved = saved.get(part) if isinstance(saved, dict) else None
    return saved


def flat(sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The value of each key, such as train.steps."""
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def flat_values(file: Any) -> dict[str, Any] | None:
    """The value of each key, such as train.steps, read likewise; None if there is no file, or it is damaged."""
    try:
        return flat(_saved(file))
    except AttributeError:
        return None


def _saved(file: Any) -> Any:
    if "://" not in str(file) and not Path(file).is_file():  # reading a FIFO would wait for ever
        return None
    import yaml  # not with the first import of a command, which would not end as it should at a signal then

    try:
        return yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return None


def saved_checkpoint_dir(file: Any) -> str | None:
    """checkpoint.dir of the run whose config.yaml is `file`, where it is now; None if there is no such file."""
    saved, run = saved_value(file, "checkpoint.dir"), saved_value(file, "run.dir")
    return _moved(saved, run, str(file.parent)) if isinstance(saved, str) and saved else None


def in_its_place(config: Config, file: Path, overrides: list[str]) -> Config:
    """`config`, read from `file`; if that is the config.yaml of a run, with run.dir, and a checkpoint.dir in it, where
    the file is, or in the run.dir of `overrides`.

    Raises UserError if the run is a copy, and the original and the copy would save to the same checkpoint.dir.
    """
    old = saved_value(file, "run.dir") if _is_of_a_run(file) else None
    if not isinstance(old, str):
        return config
    given = {item.partition("=")[0] for item in overrides}
    new = config.run.dir if "run.dir" in given or _same(old, file.parent) else str(file.parent)
    saved = config.checkpoint.dir
    checkpoints = saved if "checkpoint.dir" in given else _moved(saved, old, new)
    is_copy = new != old and "run.dir" not in given and Path(old, "config.yaml").is_file()
    if is_copy and checkpoints == saved and "checkpoint.dir" not in given:
        raise UserError(
            f"{file.parent} is a copy of the run {old}, and both would save to checkpoint.dir={saved};\n"
            f"name another checkpoint.dir=... with a copy of the checkpoints, or that one to let this copy go on there"
        )
    return replace(config, run=replace(config.run, dir=new), checkpoint=replace(config.checkpoint, dir=checkpoints))


def _is_of_a_run(file: Path) -> bool:
    with file.open("rb") as stream:
        written_here = stream.readline().rstrip() == HEADER.encode()
    return written_here and any((file.parent / name).exists() for name in OF_A_RUN)


def _moved(path: str, old: Any, new: str) -> str:
    """`path`, under `new` instead of `old` if it is inside `old`."""
    if not isinstance(old, str) or _same(old, new) or not path.startswith(old.rstrip("/") + "/"):
        return path
    return new.rstrip("/") + path[len(old.rstrip("/")) :]


def _same(one: str | Path, other: str | Path) -> bool:
    """Whether two names are of one directory."""
    return os.path.realpath(one) == os.path.realpath(other)
