"""Too little memory is explained before, or where, it runs out."""

import jax
import pytest

import shmap_tp
from shmap_tp import chat, command_model, evaluate, generate
from shmap_tp.errors import UserError
from shmap_tp.training import environment, loop
from shmap_tp.training.environment import explained_memory_errors, require_host_memory
from tests.helpers.checkpoint_fixtures import random_state
from tests.helpers.pretrained_models import write_directory
from tests.helpers.run_fixtures import tiny


def has_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(environment.os, "sysconf", lambda name: size if name == "SC_PHYS_PAGES" else 1)


@pytest.mark.parametrize("shape", [(1, 8), (8, 1)])
def test_the_state_of_all_emulated_devices_must_fit_into_the_machine(functions, shape, monkeypatch):
    """On (8, 1) every device has a copy."""
    state = random_state(functions(*shape), 0)
    needed = sum(shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards)
    has_memory(monkeypatch, needed)
    require_host_memory(functions(*shape).shapes)
    has_memory(monkeypatch, needed - 1)
    with pytest.raises(UserError, match=r"optimizer state take .* GB on the emulated devices, but this machine has"):
        require_host_memory(functions(*shape).shapes)


def test_a_run_is_refused_before_its_state_is_made_and_says_if_it_emulates_many_devices(tmp_path, monkeypatch, capsys):
    has_memory(monkeypatch, 1000)
    for cores, expected in [(2, ""), (1, "warning: 8 devices are emulated on 1 core,")]:
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        monkeypatch.setattr(environment, "EMULATED_PER_CORE", 4)
        with pytest.raises(UserError, match=r"but this machine has 0\.0 GB"):
            loop.train(tiny(tmp_path))
        printed = capsys.readouterr().out
        assert printed.startswith(expected) and ("warning" in printed) == bool(expected)


def test_a_device_that_is_out_of_memory_is_explained(tmp_path, monkeypatch):
    def compile_with(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.\nmany more lines")

    monkeypatch.setattr("shmap_tp.training.run.compile_with", compile_with)
    with pytest.raises(UserError) as raised:
        loop.train(tiny(tmp_path))
    first, second = str(raised.value).splitlines()
    assert first == "a device has not enough memory: RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.;"
    assert "python -m shmap_tp.plan" in second


def test_a_model_that_does_not_fit_into_the_machine_is_refused_before_it_is_read(uninterrupted, tmp_path, monkeypatch):
    """Initial, restored and pretrained parameters."""
    directory = write_directory(tmp_path / "m", "llama")
    monkeypatch.setattr(environment.os, "sysconf", lambda _: 100)
    made = (
        lambda: shmap_tp.Model.initialize(shmap_tp.load_config("model=test", "mesh.dp=1", "mesh.mp=1")),
        lambda: shmap_tp.Model.restore(uninterrupted / "run", dp=1, mp=1),
        lambda: shmap_tp.from_pretrained(directory),
    )
    for make in made:
        with pytest.raises(UserError, match=r"^parameters take .* GB .* this machine has 0\.0 GB;\n.*bfloat16"):
            make()


def test_a_command_that_uses_a_model_explains_that_a_device_is_out_of_memory(tmp_path, monkeypatch, capsys):
    def open_model(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.\nmany more lines")

    for command, more in ((generate, ["--prompt", "a"]), (chat, []), (evaluate, [])):
        monkeypatch.setattr(command_model, "open_model", open_model)
        assert command.main(["--checkpoint", str(tmp_path), *more]) == 2
        first, second = capsys.readouterr().err.splitlines()
        assert first == "error: a device has not enough memory: RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.;"
        assert "mp shards the weights" in second


def test_other_errors_of_the_runtime_are_passed_on():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), explained_memory_errors():
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")
