"""Components of the user's own, from a file: `--components my_file.py:components`; and whether a checkpoint's run had
the same."""

import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError, first_line, shown
from shmap_tp.model.sharded_model import PARTS
from shmap_tp.parallel.tensor_parallel import TensorParallel
from shmap_tp.runtime.files import file_size
from shmap_tp.training.step import CONFIGURED, Components


def load_components(given: str) -> Components:
    """The `Components` that FILE.py:NAME names.  FILE.py is executed; it may import files beside it.

    Raises UserError if there is no such file or name, its execution fails, or NAME is something else.
    """
    name, _, attribute = given.rpartition(":")
    if not (name.endswith(".py") and attribute.isidentifier()):
        raise UserError(f"--components {given} must be FILE.py:NAME, for example my_file.py:components")
    file = Path(name)
    if file_size(file) is None:
        raise UserError(f"--components {given}: there is no file {name}; correct its path")
    found = getattr(_executed(file, given), attribute, None)
    if not isinstance(found, Components):
        what = "nothing" if found is None else f"of type {type(found).__name__}"
        raise UserError(
            f"--components {given}: {attribute} in {name} is {what}; write\n"
            f"{attribute} = shmap_tp.Components(...) there, as docs/extending.md shows"
        )
    for part in ("block", "mlp", "make_optimizer", "load_parameters"):
        if (value := getattr(found, part)) is not None and not callable(value):
            raise UserError(f"--components {given}: {part}={shown(value)} must be a function or a class")
    if found.tensor_parallel is not None and not isinstance(found.tensor_parallel, TensorParallel):
        raise UserError(
            f"--components {given}: tensor_parallel={shown(found.tensor_parallel)} must be a mode, as those of "
            f"shmap_tp/parallel/tensor_parallel.py"
        )
    return found


def components_of(config: Config, given: Components = CONFIGURED) -> Components:
    """`given`, or if there are none those that run.components names.  Raises UserError as `load_components` does.

    Only for a configuration that the user names, not for that of a checkpoint, which may be somebody else's: the file
    is executed.
    """
    return given if config.run.components is None or given != CONFIGURED else load_components(config.run.components)


def recorded_parts(facts: Any) -> list[Any] | None:
    """The parts that were replaced in the run that saved the facts; None from before they were recorded."""
    recorded = facts.get("components") if isinstance(facts, dict) else None
    return recorded if isinstance(recorded, list) else None


def require_components(facts: Any, given: Components, checkpoint: str, parts: Sequence[str] = PARTS) -> None:
    """Raise UserError unless `given` replace the same of these `parts` as the run that saved the facts."""
    recorded = recorded_parts(facts)
    if recorded is None:
        return
    before, now = ([part for part in parts if part in found] for found in (recorded, given.replaced))
    if before == now:
        return
    file = (facts["config"].get("run") or {}).get("components")
    way_out = f"give --components {shown(file)}" if isinstance(file, str) else "give the same Components, in Python"
    raise UserError(
        f"checkpoint {checkpoint} is of a run with {' and '.join(before) or 'no part'} of its own, here there is "
        f"{' and '.join(now) or 'none'};\n{way_out if before else 'leave out --components (run.components=null)'}"
    )


def _executed(file: Path, given: str) -> object:
    """The module in `file`."""
    specification = importlib.util.spec_from_file_location(f"components_{file.stem}", file)
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module  # dataclasses look it up
    sys.path.append(str(file.resolve().parent))
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == specification.origin]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else "?")
        raise UserError(
            f"--components {given}: {file}, line {line}: {type(error).__name__}: {first_line(error)};\n"
            f"correct the file: `python {file}` shows where it fails"
        ) from error
    return module
