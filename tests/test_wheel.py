"""The wheel holds every module and the configuration, and requires what they import; installed elsewhere, it trains."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import shmap_tp
from tests.helpers.compiling import quick_environment
from tests.helpers.run_fixtures import ROOT, TINY, write_tokens

pytest.importorskip("setuptools", minversion="70.1", reason="the first that builds wheels by itself")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built from a copy of it: what an earlier build left behind does not count."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("shmap_tp", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out), cwd=source)
    (made,) = out.glob("*.whl")
    return made


def pip(*arguments: str, cwd: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_every_module_and_the_configuration_and_nothing_else(wheel):
    modules = {file.relative_to(ROOT).as_posix() for file in (ROOT / "shmap_tp").rglob("*.py")}
    configuration = {f"shmap_tp/{file.relative_to(ROOT).as_posix()}" for file in (ROOT / "conf").rglob("*.*")}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == modules | configuration
    assert len(configuration) > 20
    information = f"shmap_tp-{shmap_tp.__version__}.dist-info"
    commands = zipfile.ZipFile(wheel).read(f"{information}/entry_points.txt").decode()
    assert commands.split() == ["[console_scripts]", "shmap-tp", "=", "shmap_tp.cli:main"]
    assert f"\nVersion: {shmap_tp.__version__}\n" in zipfile.ZipFile(wheel).read(f"{information}/METADATA").decode()


def test_the_version_is_stated_once_in_the_package():
    """So that a clone and an archive without metadata have it, too."""
    assert re.fullmatch(r"\d+\.\d+\.\d+", shmap_tp.__version__) and "version" not in PROJECT


DISTRIBUTIONS = {"hydra": "hydra-core", "orbax": "orbax-checkpoint", "yaml": "pyyaml"}
"""The distributions of imported packages whose distribution has another name."""
WITH_JAX = {"ml_dtypes"}
"""Packages that JAX requires and defines its dtypes by."""


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def distributions(requirements: list[str]) -> list[str]:
    return [re.split(r"[\[<>=]", line)[0].replace("_", "-") for line in requirements]


def test_every_imported_package_is_required_once():
    required = distributions(PROJECT["dependencies"])
    optional = distributions([line for extra in PROJECT["optional-dependencies"].values() for line in extra])
    imported = {name.split(".")[0] for file in (ROOT / "shmap_tp").rglob("*.py") for name in imported_modules(file)}
    foreign = imported - {*sys.stdlib_module_names, "shmap_tp"} - WITH_JAX
    assert sorted({*required}) == sorted(required)
    assert {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in foreign} <= {*required, *optional}


def imported_modules(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    whole = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    return whole | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.slow
def test_an_installed_wheel_trains_and_restores_from_another_directory(wheel, tmp_path):
    site, work = tmp_path / "site", tmp_path / "work"
    pip("install", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=tmp_path)
    write_tokens(work / "data")

    def call(*arguments: str) -> str:
        environment = os.environ | quick_environment() | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(site)}
        given = {"capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run([sys.executable, *arguments], cwd=work, env=environment, **given)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(site) in call("-c", "import shmap_tp.config.compose as c; print(c.CONF)")
    assert call("-c", "import shmap_tp; print(shmap_tp.__version__)").strip() == shmap_tp.__version__
    command = str(site / "bin" / "shmap-tp")
    given = [*TINY, "data.dir=data", "run.dir=run", "train.steps=4"]
    printed = call(command, "train", *given)
    assert "done at step 4 of 4" in printed and "to resume   shmap-tp train --cfg run/config.yaml" in printed
    assert "4: intact" in call(command, "verify", "checkpoint", "run/checkpoints")
    shape = "import shmap_tp; m = shmap_tp.Model.restore('run', dp=8, mp=1); print(m.logits([[1, 2]]).shape)"
    assert "(1, 2, 64)" in call("-c", shape)
