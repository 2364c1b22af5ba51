"""What this package needs to be imported: a recent Python, and the packages that pip installs with it.

Where a virtual environment was forgotten, one of the two is missing.  `shmap_tp/__init__.py` asks before anything else
is imported; both files must be readable for every Python from 3.6 on.
"""

import importlib.util
import os
import sys

PYTHON = (3, 11)
_PACKAGES = """
    jax equinox optax orbax tensorstore etils fsspec numpy safetensors tokenizers hydra omegaconf yaml jaxtyping tqdm
    matplotlib tensorboardX
"""
PACKAGES = _PACKAGES.split()
"""The dependencies of pyproject.toml, by the names that are imported."""


def check_requirements() -> None:
    """Raise ImportError if this Python is too old or lacks a package; a command of this project ends with a line."""
    reason = _what_is_missing()
    if reason and _is_command():
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(2)
    if reason:
        raise ImportError(reason)


def _what_is_missing() -> str:
    activate = "is the virtual environment active (source .venv/bin/activate)?"
    if sys.version_info < PYTHON:
        found = ".".join(map(str, sys.version_info[:2]))
        return f"this is Python {found}, and shmap_tp needs 3.11 or newer; {activate}"
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        return f"this Python has no {', '.join(missing[:3])}; {activate} If there is none yet: pip install -e ."
    return ""


def _is_command() -> bool:
    """Whether this process was started as `python -m shmap_tp...`, from a file of this project, or as shmap-tp."""
    program = sys.argv[0] if sys.argv else ""
    project = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    is_script = os.path.abspath(program).startswith(project + os.sep) and program.endswith(".py")
    return program == "-m" or is_script or os.path.basename(program) == "shmap-tp"
