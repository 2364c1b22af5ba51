"""The public library: its functions agree with the dense reference, with training runs and with each other."""

import inspect
import re
import textwrap
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import shmap_tp
from shmap_tp.api import build
from tests.helpers import reference
from tests.helpers.assertions import RELATIVE, assert_close, assert_same_bits, by_path
from tests.helpers.fresh_process import python
from tests.helpers.model_fixtures import sequences, small

OTHER_MODEL = "model.tie_embeddings=true", "model.positions=learned"
MODES = {
    "all-reduce": ((2, 4),),
    "ZeRO-1": ((8, 1), "mesh.zero=zero1"),
    "collective matmul": ((1, 4), "mesh.tensor_parallel=collective_matmul"),
    "sequence and FSDP": ((4, 2), "mesh.tensor_parallel=sequence", "mesh.zero=fsdp", *OTHER_MODEL),
}


@cache
def model(mode: str = "all-reduce") -> shmap_tp.Model:
    shape, *overrides = MODES[mode]
    return shmap_tp.Model.initialize(small(*shape, *overrides))


# The package


def test_importing_shmap_tp_imports_no_jax_and_too_few_devices_of_a_backend_in_use_are_explained(tmp_path):
    done = python(
        """
        import sys, time
        begin = time.perf_counter()
        import shmap_tp
        assert time.perf_counter() - begin < 1
        assert "jax" not in sys.modules and "numpy" not in sys.modules
        assert {*shmap_tp.__all__} <= {*dir(shmap_tp)}
        for name in shmap_tp.__all__:
            assert getattr(shmap_tp, name).__doc__, name
        config = shmap_tp.load_config("model=test", "mesh.dp=2", "mesh.mp=4", "data.source=null")
        from jax._src import xla_bridge
        assert not xla_bridge.backends_are_initialized()

        import jax
        jax.devices()
        for act in (shmap_tp.make_mesh, shmap_tp.Model.initialize, shmap_tp.Trainer, shmap_tp.run_training):
            try:
                act(config)
            except shmap_tp.UserError as error:
                assert len(str(error).splitlines()) == 2
                print(str(error).replace(chr(10), " "))
        """,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 4
    for line in said:
        assert "needs 8 " in line and "JAX already runs with 1" in line and "restart Python" in line


def test_the_docstring_names_everything_public():
    assert {*shmap_tp.__all__} == {*shmap_tp._MODULES, "__version__"}
    for name in shmap_tp.__all__:
        assert name in shmap_tp.__doc__.split("Contents")[1]
    with pytest.raises(AttributeError, match="no attribute 'load_konfig'; it has load_config"):
        shmap_tp.load_konfig  # noqa: B018


def test_the_example_in_the_docstring_runs(capsys):
    example = shmap_tp.__doc__.split("on the CPU.\n\n")[1].split("\n\nContents")[0]
    example, names = textwrap.dedent(example), {}
    assert 10 <= len(example.splitlines()) <= 16
    exec(example, names)
    losses = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 5 and losses[-1] < losses[0] and float(names["loss"]) < losses[0]
    assert names["logits"].shape == (16, 32, 256)
    assert names["gradients"].norm.scale.shape == names["model"].parameters.norm.scale.shape


# Devices


@pytest.mark.parametrize("shapes", [[(2, 8), (1, 2)], [(1, 2), (2, 4), (4, 1)]], ids=["sixteen devices", "eight"])
def test_a_process_can_use_several_meshes_of_up_to_eight_devices_or_of_the_first_if_that_is_larger(shapes):
    done = python(
        f"""
        from shmap_tp.config.compose import CONF, load
        from shmap_tp.training.environment import make_mesh
        for dp, mp in {shapes}:
            config = load(str(CONF / "base.yaml"), ["model=test", f"mesh.dp={{dp}}", f"mesh.mp={{mp}}"])
            print(tuple(make_mesh(config).shape.values()))
        """
    )
    assert done.stdout.splitlines() == [str(shape) for shape in shapes], done.stderr


def test_dp_auto_takes_all_devices():
    config = shmap_tp.load_config("model=test", "mesh.dp=auto", "mesh.mp=2")
    assert dict(shmap_tp.make_mesh(config).shape) == {"dp": 4, "mp": 2}
    assert build(config, shmap_tp.Components())[0].mesh.dp == 4


def test_several_processes_are_refused():
    with pytest.raises(shmap_tp.UserError, match="one process; start several with shmap-tp train"):
        shmap_tp.Model.initialize(small(2, 4, "mesh.processes=2"))


# Model

TOKENS, COUNTED = sequences(3, 9), np.random.default_rng(1).random((3, 9)) < 0.5
COUNTED[0, :6], COUNTED[2] = False, False  # a prompt, and a row of which nothing counts
TOKENS[1, 6:], COUNTED[1, 6:] = -1, True  # the padding of a row never counts


@cache
def expected(*overrides: str) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """(logits, loss, gradients) of the dense reference, whose inputs and targets are separate arrays."""
    config = small(1, 1, *overrides).model
    inputs, targets = np.maximum(TOKENS[:, :-1], 0), np.where(COUNTED, TOKENS, -1)[:, 1:]

    def objective(p: dict) -> Any:
        logits = reference.transformer(p, inputs, config)
        nll, logz = reference.cross_entropy(logits, targets, 50)
        loss = nll.sum() / (targets >= 0).sum()
        return loss + 0.01 * (logz**2).sum() / (targets >= 0).sum(), (logits[..., :50], loss)

    parameters = model("sequence and FSDP" if overrides else "all-reduce").parameters
    with jax.enable_x64(True):
        in_float64 = {path: array.astype(np.float64) for path, array in by_path(parameters).items()}
        gradients, (logits, loss) = jax.jit(jax.grad(objective, has_aux=True))(in_float64)
        return np.asarray(logits), np.asarray(loss), by_path(gradients)


@pytest.mark.parametrize("mode", MODES)
def test_logits_loss_and_gradients_are_those_of_the_dense_reference(mode):
    """dp does not divide the batch, and the sequences are shorter than the context; targets that are not counted are
    still inputs.  Padded columns are not returned."""
    of_mode, wanted = model(mode), OTHER_MODEL if "FSDP" in mode else ()
    wanted_logits, wanted_loss, wanted_gradients = expected(*wanted)
    logits = of_mode.logits(TOKENS[:, :5])
    assert logits.shape == (3, 5, 50) and logits.dtype == np.float32
    assert_close(logits, wanted_logits[:, :5], RELATIVE["float32"])
    loss, gradients = of_mode.loss_and_gradients(TOKENS, COUNTED)
    assert_close(loss, wanted_loss, RELATIVE["float32"])
    assert_close(of_mode.loss(TOKENS, COUNTED.tolist()), wanted_loss, RELATIVE["float32"])
    assert jax.tree.structure(gradients) == jax.tree.structure(of_mode.parameters)
    assert_close(by_path(gradients), wanted_gradients, RELATIVE["float32"])
    if not wanted:
        assert_same_bits(of_mode.parameters, model().parameters)


def test_experts_leave_out_the_padding_of_rows():
    """Rows of six tokens in a context of 8, and a row more for dp: the auxiliary losses are those of a context of 6."""
    keys = "block=sequential mlp=swiglu experts=4 router_balance_loss=1 router_z_loss=1 positions=rotary"
    experts = [f"model.{key}" for key in keys.split()]
    longer = shmap_tp.Model.initialize(small(4, 1, *experts))
    shorter = shmap_tp.Model.initialize(small(1, 1, *experts, "model.context=6"))
    found, expected = (each.loss_and_gradients(TOKENS[:, :6]) for each in (longer, shorter))
    assert_close(found[0], expected[0], RELATIVE["float32"])
    assert_close(by_path(found[1]), by_path(expected[1]), RELATIVE["float32"])


def test_without_counted_all_but_the_padding_counts():
    assert float(model().loss(TOKENS)) == float(model().loss(TOKENS, TOKENS >= 0))


def test_an_update_of_ones_own_lowers_the_loss():
    loss, gradients = model().loss_and_gradients(TOKENS)
    updated = model().with_parameters(jax.tree.map(lambda w, dw: w - 0.1 * dw, model().parameters, gradients))
    assert float(updated.loss(TOKENS)) < float(loss) == pytest.approx(float(model().loss(TOKENS)))


BAD_COUNTED = {
    "an id after -1": ([[1, -1, 2], [3, 4, -1]], None, "tokens[0, 1] is -1, but an id follows"),
    "another shape": ([[1, 2, 3]], [[True, True]], "counted must be bool[1, 3], one for each token, not bool[1, 2]"),
    "numbers": ([[1, 2, 3]], np.array([[1, 1, 0]]), "counted must be bool[1, 3], one for each token, not int64[1, 3]"),
}


@pytest.mark.parametrize("case", BAD_COUNTED)
def test_targets_that_cannot_be_used_are_explained(case):
    tokens, counted, expected = BAD_COUNTED[case]
    for use in (model().loss, model().loss_and_gradients):
        with pytest.raises(shmap_tp.UserError, match=re.escape(expected)) as raised:
            use(tokens, counted)
        assert str(raised.value).count("\n") <= 1


BAD_TOKENS = {
    "one sequence": (np.zeros(5, int), "must be integers [batch, time], not int64[5]"),
    "no sequence": (np.zeros((0, 5), int), "must be integers [batch, time]"),
    "floats": (np.zeros((2, 5)), "must be integers [batch, time], not float64[2, 5]"),
    "too long": (np.zeros((2, 10), int), "tokens have 10 positions, and with model.context=8"),
    "an id of the padding": (np.full((2, 5), 50), "token id 50 is not in"),
    "a negative id": (np.full((2, 5), -2), "token id -2 is not in"),
    "rows of different lengths": ([[1, 2], [3]], "must be integers [batch, time], but their rows have different len"),
}


@pytest.mark.parametrize("case", BAD_TOKENS)
def test_tokens_that_cannot_be_used_are_explained(case):
    tokens, expected = BAD_TOKENS[case]
    for use in (model().logits, model().loss, model().loss_and_gradients):
        with pytest.raises(shmap_tp.UserError) as raised:
            use(tokens)
        assert expected in str(raised.value)


def test_a_list_given_to_load_config_is_explained():
    with pytest.raises(shmap_tp.UserError, match=r"not \['a=1'\]; give a list as load_config\(\*list\)"):
        inspect.unwrap(shmap_tp.load_config)(["a=1"])


def test_a_model_is_shown_in_one_line():
    assert repr(model()).endswith(" parameters, mesh dp=2, mp=4)")
