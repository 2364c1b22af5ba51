"""A Python that is too old, or without the packages: a command says so in one line, and the library raises it."""

import ast
import subprocess
import sys
import tomllib

import pytest

from shmap_tp.runtime import requirements
from tests.helpers.paths import ROOT

OTHER_NAMES = {"orbax-checkpoint": "orbax", "etils[epath]": "etils", "hydra-core": "hydra", "pyyaml": "yaml"}
COMMANDS = ["main.py --check", "-m shmap_tp.plan --help", "benchmarks/benchmark_tpu.py --dp 1 --mp 1"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_its_packages_ends_with_one_line(command):
    """With -S, as a Python outside of the virtual environment."""
    done = subprocess.run([sys.executable, "-S", *command.split()], cwd=ROOT, env={}, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: this Python has no jax, equinox, optax; is the virtual environment active")
    assert "pip install -e ." in done.stderr and done.stderr.count("\n") == 1


def test_an_older_python_is_refused_with_the_one_that_is_needed(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    with pytest.raises(ImportError, match=r"this is Python 3\.10, and shmap_tp needs 3\.11 or newer"):
        requirements.check_requirements()


@pytest.mark.parametrize("file", ["main.py", "shmap_tp/__init__.py", "shmap_tp/runtime/requirements.py"])
def test_an_older_python_can_read_what_tells_it(file):
    ast.parse((ROOT / file).read_text(), feature_version=(3, 6))


def test_the_packages_are_those_that_pip_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [line.split(">")[0].split("<")[0] for line in project["dependencies"]]
    assert [OTHER_NAMES.get(name, name) for name in names] == requirements.PACKAGES
    assert project["requires-python"] == f">={'.'.join(map(str, requirements.PYTHON))}"
