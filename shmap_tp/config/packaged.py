"""Where the configuration of this project is, and how messages name it and the training command."""

from pathlib import Path

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
