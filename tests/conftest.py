"""Eight emulated CPU devices, shapes and dtypes checked at every call: all set before shmap_tp or a backend is touched.

Programs are compiled as in a run up to the machine code, which LLVM leaves unoptimised here and which XLA emits loop by
loop, without MLIR and in one module (jax 0.10): the collectives are the same, and compiling takes a fraction of the
time.  Compiled programs are kept between test runs.

The whole suite runs in as many processes as there are cores, up to four, where pytest-xdist is installed: a test keeps
little more than one core busy.  A file or a test that is named runs in one, as does all of it with `-n 0`.

`pytest -m quick` runs only the tests in the files of tests/helpers/quick.py: the cheapest of each directory.
"""

import os
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

from tests.helpers.compiling import QUICK_TO_COMPILE
from tests.helpers.quick import QUICK

WITH_ARRAYS = ["api", "data", "inference", "layers", "model", "parallel", "pretrained", "trainer", "training"]
"""Modules and packages whose annotations have shapes.  Every call of a function is checked, which takes time: the
planner's functions, called for each equation of a program, have none."""

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_TO_COMPILE}"  # read with the first backend

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "xla-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
install_import_hook([f"shmap_tp.{name}" for name in WITH_ARRAYS], "beartype.beartype")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Before pytest-xdist looks at its options.  Accelerators belong to one process at a time."""
    accelerators = [node for name in ("accel*", "vfio/[0-9]*", "nvidia[0-9]*") for node in Path("/dev").glob(name)]
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not config.option.usepdb
    is_worker = hasattr(config, "workerinput")  # which comes by here, too, and must not start others
    idle = config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None and not is_worker
    if whole and idle and not accelerators:
        config.option.numprocesses = min(4, os.cpu_count() or 1)
        config.option.dist = "worksteal"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in the files of QUICK, except those that are slow."""
    for item in items:
        if item.path.stem in QUICK.get(item.path.parent.name, []) and not item.get_closest_marker("slow"):
            item.add_marker("quick")
