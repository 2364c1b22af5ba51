"""Programs that were compiled for devices that are not here are kept, each by all that it was made from."""

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
from shmap_tp.plan import aot_compile as ahead
from shmap_tp.plan.aot_compile import Compiled, compile_ahead
from tests.helpers.fake_tpu_devices import box


@dataclass
class Lowered:
    """A program that notes how often it is compiled."""

    text: str = "module @step"
    fails: str | None = None
    host: int = 0
    """Bytes that the host keeps."""
    reports: bool = True
    """Whether the compiler writes what it gave to what."""
    options: list[dict] = field(default_factory=list)
    """Of each time, but for where the compiler is to write what it made."""
    __class__ = jax.stages.Lowered

    def as_text(self) -> str:
        return self.text

    def compile(self, compiler_options: dict) -> SimpleNamespace:
        folder = Path(compiler_options["xla_dump_to"])
        self.options.append({name: value for name, value in compiler_options.items() if name != "xla_dump_to"})
        if self.fails:
            raise jax.errors.JaxRuntimeError(self.fails)
        if self.reports:
            (folder / f"module_0000.jit_step.after_optimizations-{ahead.REPORT}").write_text(
                "Memory Space: default (color=0)\nTotal bytes: 8 (8B)\n  cumulative_size;       size;\n\n"
                "Memory Space: vmem (color=1)\nTotal bytes: 9 (9B)\n"
            )
        memory = SimpleNamespace(
            peak_memory_in_bytes=7 + self.host, argument_size_in_bytes=5, output_size_in_bytes=4, alias_size_in_bytes=3,
            temp_size_in_bytes=2, host_temp_size_in_bytes=self.host,
        )  # fmt: skip
        return SimpleNamespace(as_text=lambda: f"compiled {self.text}", memory_analysis=lambda: memory)


@dataclass
class On:
    """A mesh of stand-ins."""

    devices: np.ndarray
    __class__ = Mesh


def mesh(version: str = "v5e", *sides: int, slices: int = 1, order: int = 1) -> On:
    devices = sorted(box(version, *(sides or (2, 2)), slices=slices), key=lambda d: (d.slice_index, *d.place))
    return On(np.array(devices[::order], object).reshape(2, -1))


@pytest.fixture(autouse=True)
def versions(monkeypatch) -> Callable[[str], None]:
    """versions(number) makes that the version of JAX and libtpu."""

    def use(number: str) -> None:
        monkeypatch.setattr(ahead.importlib.metadata, "version", lambda name: number)

    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    use("1")
    return use


def test_the_second_time_it_is_read(tmp_path):
    lowered = Lowered()
    first, second = (compile_ahead(lowered, mesh(), tmp_path / "kept") for _ in range(2))
    assert first == second == Compiled("compiled module @step", 7, 15.75 * GIB, 5, first.seconds)
    assert first.fits and len(lowered.options) == 1
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.name.endswith(".json.gz")


def test_what_the_host_keeps_is_no_part_of_the_device():
    found = compile_ahead(Lowered(host=100), mesh(), None)
    assert (found.peak_bytes, found.host_bytes) == (8, 100)


def test_a_compiler_that_reports_no_memory_is_named():
    """It is needed only where the host keeps some."""
    assert compile_ahead(Lowered(reports=False), mesh(), None).peak_bytes == 7
    with pytest.raises(UserError, match=r"^libtpu 1 does not report .* model\.offload"):
        compile_ahead(Lowered(host=100, reports=False), mesh(), None)


def test_nothing_is_kept_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lowered = Lowered()
    for _ in range(2):
        compile_ahead(lowered, mesh(), None)
    assert len(lowered.options) == 2 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "other",
    [
        {"lowered": Lowered("module @other")},
        {"mesh": mesh("v6e")},
        {"mesh": mesh("v5e", 2, 4)},
        {"mesh": mesh(order=-1)},
        {"mesh": mesh(slices=2)},
        {"options": {"xla_flag": "1"}},
        {"environment": "--xla_flag=1"},
        {"version": "2"},
    ],
    ids=["program", "kind", "devices", "order", "slices", "options", "LIBTPU_INIT_ARGS", "version"],
)
def test_what_is_made_from_anything_else_is_compiled(tmp_path, monkeypatch, versions, other):
    compile_ahead(Lowered(), mesh(), tmp_path)
    if "version" in other:
        versions(other["version"])
    if "environment" in other:
        monkeypatch.setenv("LIBTPU_INIT_ARGS", other["environment"])
    lowered = other.get("lowered", Lowered())
    compile_ahead(lowered, other.get("mesh", mesh()), tmp_path, other.get("options"))
    assert lowered.options == [other.get("options", {})]
    assert len(list(tmp_path.iterdir())) == 2


TOO_LARGE = {
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 48.19G of 15.75G hbm. Exceeded hbm capacity by 32.44G.": (48.19 * GIB, 15.75 * GIB),
    "RESOURCE_EXHAUSTED: Program hbm requirement (512.00M) exceeds available HBM (0.25G)": (0.5 * GIB, 0.25 * GIB),
}


@pytest.mark.parametrize("said", TOO_LARGE)
def test_what_does_not_fit_says_what_it_needs_and_is_kept(tmp_path, said):
    lowered = Lowered(fails=said)
    for _ in range(2):
        found = compile_ahead(lowered, mesh(), tmp_path)
    assert not found.fits and found.argument_bytes is None
    assert (found.peak_bytes, found.limit_bytes) == pytest.approx(TOO_LARGE[said])
    assert len(lowered.options) == 1


def test_what_else_goes_wrong_is_told_and_not_kept(tmp_path):
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such flag"):
        compile_ahead(Lowered(fails="INVALID_ARGUMENT: no such flag"), mesh(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_two_processes_may_keep_the_same_at_once(tmp_path, monkeypatch):
    """The other one is done between this one's writing and its renaming."""
    replace = Path.replace

    def later(part: Path, kept: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        monkeypatch.setattr(ahead.os, "getpid", lambda: 1)
        assert compile_ahead(Lowered(), mesh(), tmp_path).fits
        return part.replace(kept)

    monkeypatch.setattr(Path, "replace", later)
    assert compile_ahead(Lowered(), mesh(), tmp_path).fits
    assert [path.suffix for path in tmp_path.iterdir()] == [".gz"]


def test_limits_are_those_of_the_table():
    assert compile_ahead(Lowered(), mesh("v4"), None).limit_bytes == DEVICES["TPU v4"].memory
