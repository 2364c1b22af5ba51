"""Programs compiled ahead of time are cached by everything that determines the result."""

import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import DEVICES, GIB
from shmap_tp.parallel.mesh import DP, MP
from shmap_tp.plan import targets
from shmap_tp.plan.targets import Compiled, compile_ahead_of_time
from tests.helpers.fake_tpu_devices import fake_slice


@dataclass
class FakeLowered:
    """A lowered program that records how often it is compiled."""

    text: str = "module @step"
    fails: str | None = None
    host: int = 0
    """Bytes offloaded to host memory."""
    reports: bool = True
    """Whether the compiler writes a memory report."""
    printable: bool = True
    """Whether the compiler can write the schedule."""
    options: list[dict] = field(default_factory=list)
    """Compiler options of each compilation, without the dump directory."""
    __class__ = jax.stages.Lowered

    def as_text(self) -> str:
        return self.text

    def compile(self, compiler_options: dict) -> SimpleNamespace:
        folder = Path(compiler_options["xla_dump_to"])
        self.options.append({name: value for name, value in compiler_options.items() if name != "xla_dump_to"})
        if self.fails:
            raise jax.errors.JaxRuntimeError(self.fails)
        if self.reports:
            (folder / f"module_0000.jit_step.after_optimizations-{targets.MEMORY_REPORT}").write_text(
                "Memory Space: default (color=0)\nTotal bytes: 8 (8B)\n  cumulative_size;       size;\n\n"
                "Memory Space: vmem (color=1)\nTotal bytes: 9 (9B)\n"
            )
        memory = SimpleNamespace(
            peak_memory_in_bytes=7 + self.host, argument_size_in_bytes=5, output_size_in_bytes=4, alias_size_in_bytes=3,
            temp_size_in_bytes=2, host_temp_size_in_bytes=self.host,
        )  # fmt: skip

        def as_text() -> str:
            if not self.printable:
                raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure\nmore")
            return f"compiled {self.text}"

        return SimpleNamespace(as_text=as_text, memory_analysis=lambda: memory)


def mesh(version: str = "v5e", *sides: int, slices: int = 1, order: int = 1) -> Mesh:
    """A mesh of fake TPU devices."""
    devices = sorted(fake_slice(version, *(sides or (2, 2)), slices=slices), key=lambda d: (d.slice_index, *d.place))
    return Mesh(np.array(devices[::order], object).reshape(2, -1), (DP, MP))


@pytest.fixture(autouse=True)
def versions(monkeypatch) -> Callable[[str], None]:
    """versions(number) sets the version of JAX and libtpu."""

    def use(number: str) -> None:
        monkeypatch.setattr(targets.importlib.metadata, "version", lambda name: number)

    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    use("1")
    return use


def test_the_second_compilation_is_read_from_the_cache(tmp_path):
    lowered = FakeLowered()
    first, second = (compile_ahead_of_time(lowered, mesh(), tmp_path / "cache") for _ in range(2))
    assert first == second == Compiled("compiled module @step", 7, 15.75 * GIB, 5, first.seconds)
    assert first.fits and len(lowered.options) == 1
    (entry,) = (tmp_path / "cache").iterdir()
    assert entry.name.endswith(".json.gz")
    assert compile_ahead_of_time(FakeLowered(), mesh("v4"), None).limit_bytes == DEVICES["TPU v4"].memory


def test_host_memory_is_not_counted_as_device_memory_which_needs_a_memory_report():
    found = compile_ahead_of_time(FakeLowered(host=100), mesh(), None)
    assert (found.peak_bytes, found.host_bytes) == (8, 100)
    assert compile_ahead_of_time(FakeLowered(reports=False), mesh(), None).peak_bytes == 7
    with pytest.raises(UserError, match=r"^libtpu 1 does not report .* model\.offload"):
        compile_ahead_of_time(FakeLowered(host=100, reports=False), mesh(), None)


def test_without_a_cache_directory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lowered = FakeLowered()
    for _ in range(2):
        compile_ahead_of_time(lowered, mesh(), None)
    assert len(lowered.options) == 2 and not list(tmp_path.iterdir())


OTHERS = {
    "program": {"lowered": FakeLowered("module @other")}, "kind": {"mesh": mesh("v6e")},
    "devices": {"mesh": mesh("v5e", 2, 4)}, "order": {"mesh": mesh(order=-1)}, "slices": {"mesh": mesh(slices=2)},
    "options": {"options": {"xla_flag": "1"}}, "LIBTPU_INIT_ARGS": {"environment": "--xla_flag=1"},
    "version": {"version": "2"},
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_change_of_any_input_is_a_cache_miss(tmp_path, monkeypatch, versions, other):
    compile_ahead_of_time(FakeLowered(), mesh(), tmp_path)
    versions(other.get("version", "1"))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", other.get("environment", ""))
    lowered = other.get("lowered", FakeLowered())
    compile_ahead_of_time(lowered, other.get("mesh", mesh()), tmp_path, other.get("options"))
    assert lowered.options == [other.get("options", {})]
    assert len(list(tmp_path.iterdir())) == 2


TOO_LARGE = {
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 48.19G of 15.75G hbm. Exceeded hbm capacity by 32.44G.": (48.19 * GIB, 15.75 * GIB),
    "RESOURCE_EXHAUSTED: Program hbm requirement (512.00M) exceeds available HBM (0.25G)": (0.5 * GIB, 0.25 * GIB),
}


@pytest.mark.parametrize("message", TOO_LARGE)
def test_a_program_that_does_not_fit_is_cached_with_the_memory_it_needs(tmp_path, message):
    lowered = FakeLowered(fails=message)
    for _ in range(2):
        found = compile_ahead_of_time(lowered, mesh(), tmp_path)
    assert not found.fits and found.argument_bytes is None
    assert (found.peak_bytes, found.limit_bytes) == pytest.approx(TOO_LARGE[message])
    assert len(lowered.options) == 1


FAILURES = {
    r"cannot compile this step: INVALID_ARGUMENT: no such flag;\n": {"fails": "INVALID_ARGUMENT: no such flag\nmore"},
    # as libtpu 0.0.52 with modules of JAX 0.10.2 that send to several devices at once
    r"compiled this step and cannot write its schedule: INTERNAL: RET_CHECK failure;\n.*'jax\[tpu\]==": {
        "printable": False
    },
}


@pytest.mark.parametrize("message", FAILURES)
def test_any_other_compiler_error_is_explained_and_not_cached(tmp_path, message):
    with pytest.raises(UserError, match=f"^libtpu 1 {message}".replace("1 cannot", "cannot")):
        compile_ahead_of_time(FakeLowered(**FAILURES[message]), mesh(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "damage",  # without a time in the zipped ones: every process of a test run must name the tests alike
    [b"", b"not gzip", *(gzip.compress(text, mtime=0) for text in (b"{", b"[]", b"{}"))],
)
def test_a_damaged_entry_of_the_cache_is_compiled_again(tmp_path, damage):
    found = compile_ahead_of_time(FakeLowered(), mesh(), tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(damage)
    lowered = FakeLowered()
    assert compile_ahead_of_time(lowered, mesh(), tmp_path).text == found.text and lowered.options
    assert compile_ahead_of_time(FakeLowered(), mesh(), tmp_path).text == found.text


def test_a_cache_that_cannot_be_written_loses_no_compiled_step(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="the compiled step is not kept"):
        assert compile_ahead_of_time(FakeLowered(), mesh(), tmp_path / "file" / "cache").fits


def test_two_processes_may_write_the_same_cache_entry(tmp_path, monkeypatch):
    """The other process finishes between this one's write and its rename."""
    replace = Path.replace

    def replace_later(partial: Path, entry: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        monkeypatch.setattr(targets.os, "getpid", lambda: 1)
        assert compile_ahead_of_time(FakeLowered(), mesh(), tmp_path).fits
        return partial.replace(entry)

    monkeypatch.setattr(Path, "replace", replace_later)
    assert compile_ahead_of_time(FakeLowered(), mesh(), tmp_path).fits
    assert [path.suffix for path in tmp_path.iterdir()] == [".gz"]
