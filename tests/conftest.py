"""Eight emulated CPU devices, shapes and dtypes checked at every call: all set before shmap_tp or a backend is touched.

Programs are compiled as in a run up to the machine code, which LLVM leaves unoptimised here and which XLA emits loop by
loop, without MLIR and in one module (jax 0.10): the collectives are the same, and compiling takes a fraction of the
time.  Compiled programs are kept between test runs.

The whole suite runs in as many processes as there are cores, up to four, where pytest-xdist is installed: a test keeps
little more than one core busy.  A file or a test that is named runs in one, as does all of it with `-n 0`.

`pytest -m quick` collects only the files of tests/helpers/quick.py: the cheapest of each directory.

`pytest -m slow --tenth 3` runs a tenth of the slow tests.  At its end every run prints its seconds by directory
(tests/helpers/processor_time.py).
"""

import ctypes
import gc
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

from tests.helpers.compiling import QUICK_TO_COMPILE
from tests.helpers.paths import ROOT
from tests.helpers.processor_time import ProcessorTime
from tests.helpers.quick import is_quick

WITH_ARRAYS = ["api", "data", "inference", "layers", "model", "parallel", "pretrained", "trainer", "training"]
"""Modules and packages whose annotations have shapes.  Every call of a function is checked, which takes time: the
planner's functions, called for each equation of a program, have none."""

PROGRAMS_FILL = 800 << 20
"""Memory of a process above which it drops what it has compiled."""

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_TO_COMPILE}"  # read with the first backend

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "xla-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
install_import_hook([f"shmap_tp.{name}" for name in WITH_ARRAYS], "beartype.beartype")


gc.set_threshold(50_000, 20, 100)  # tracing makes many objects and few cycles: a tenth of the time was collecting them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", type=int, choices=range(10), help="only this tenth of the tests, drawn by their names")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ProcessorTime(), "processor time")


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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m quick`, files without quick tests are not even imported."""
    is_test_file = collection_path.match("test_*.py")
    return True if config.option.markexpr == "quick" and is_test_file and not is_quick(collection_path) else None


@pytest.hookimpl(hookwrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark the tests in the files of QUICK, except those that are slow; of what -m and -k leave, take one tenth."""
    for item in items:
        if is_quick(item.path) and not item.get_closest_marker("slow"):
            item.add_marker("quick")
    yield
    if (tenth := config.getoption("tenth")) is not None:
        drawn = {id(item) for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode()))[tenth::10]}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in drawn])
        items[:] = [item for item in items if id(item) in drawn]


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was imported stays


@pytest.fixture(autouse=True)
def nothing_is_left_in_the_working_directory() -> Iterator[None]:
    """No test writes outside its temporary directory, or leaves another working directory."""
    before = os.getcwd(), visible_files()
    yield
    assert (os.getcwd(), visible_files()) == before


@pytest.fixture(scope="module", autouse=True)
def programs_are_dropped_before_they_fill_the_memory() -> Iterator[None]:
    """At the end of a file.  Programs that a later one shares are in the cache on disk."""
    yield
    if resident_bytes() > PROGRAMS_FILL:
        jax.clear_caches()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)  # glibc would keep what is freed, 150 to 200 MB of 740


def resident_bytes() -> int:
    """Memory that this process holds; 0 where the system does not say it as Linux does."""
    sizes = Path("/proc/self/statm")
    return int(sizes.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if sizes.exists() else 0


def visible_files() -> set[str]:
    folders = [ROOT, *(ROOT / name for name in ("benchmarks", "conf", "docs", "scripts", "tests"))]
    return {path for folder in folders for path in os.listdir(folder) if not path.startswith((".", "__pycache__"))}
