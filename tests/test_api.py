"""The public library: its functions agree with the dense reference, with training runs and with each other."""

import inspect
import re
import textwrap
from typing import Any

import jax
import numpy as np
import pytest

import shmap_tp
from tests.helpers import reference
from tests.helpers.assertions import RELATIVE, assert_close, assert_same_bits, by_path
from tests.helpers.fresh_process import python
from tests.helpers.model_fixtures import sequences, small

SEQUENCE = ["mesh.tensor_parallel=sequence"]
COLLECTIVE_MATMUL = ["mesh.tensor_parallel=collective_matmul"]
ZERO1 = ["mesh.zero=zero1"]
FSDP = ["mesh.zero=fsdp", "mesh.tensor_parallel=sequence", "model.tie_embeddings=true", "model.positions=learned"]
MODES = {"all-reduce": [], "sequence": SEQUENCE, "collective matmul": COLLECTIVE_MATMUL, "ZeRO-1": ZERO1, "FSDP": FSDP}
every_mode = pytest.mark.parametrize("mode", MODES)


def in_float64(parameters: shmap_tp.Transformer) -> dict[str, np.ndarray]:
    """The parameters as the dense reference takes them."""
    return {path: array.astype(np.float64) for path, array in by_path(parameters).items()}


# The package


def test_importing_shmap_tp_imports_no_jax_and_the_names_use_no_device():
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
        shmap_tp.load_config("mesh.dp=1", "mesh.mp=1")
        from jax._src import xla_bridge
        assert not xla_bridge.backends_are_initialized()
        """
    )
    assert done.returncode == 0, done.stderr


def test_the_docstring_names_everything_public():
    assert {*shmap_tp.__all__} == {*shmap_tp._MODULES, "__version__"}
    for name in shmap_tp.__all__:
        assert name in shmap_tp.__doc__.split("Contents")[1]
    with pytest.raises(AttributeError, match="no attribute 'load_konfig'; it has load_config"):
        shmap_tp.load_konfig  # noqa: B018


def test_the_example_in_the_docstring_runs_on_emulated_devices():
    example = shmap_tp.__doc__.split("on the CPU.\n\n")[1].split("\n\nContents")[0]
    example = textwrap.dedent(example)
    assert 10 <= len(example.splitlines()) <= 16
    done = python(
        example + "\nimport jax; print(len(jax.devices()), logits.shape, float(loss), gradients.norm.scale.shape)"
    )
    assert done.returncode == 0, done.stderr
    *losses, last = done.stdout.splitlines()
    assert len(losses) == 5 and float(losses[-1]) < float(losses[0])
    assert last.startswith("8 (16, 32, 256) ")


# Devices


@pytest.mark.parametrize("shapes", [[(2, 8), (1, 2)], [(1, 2), (2, 4), (4, 1)]], ids=["sixteen devices", "eight"])
def test_a_process_can_use_several_meshes_of_up_to_eight_devices_or_of_the_first_if_that_is_larger(shapes):
    done = python(
        f"""
        import shmap_tp
        for dp, mp in {shapes}:
            config = shmap_tp.load_config("model=test", f"mesh.dp={{dp}}", f"mesh.mp={{mp}}")
            print(tuple(shmap_tp.make_mesh(config).shape.values()))
        """
    )
    assert done.stdout.splitlines() == [str(shape) for shape in shapes], done.stderr


def test_too_few_devices_of_a_backend_in_use_are_explained(tmp_path):
    done = python(
        """
        import jax
        import shmap_tp
        jax.devices()
        config = shmap_tp.load_config("model=test", "mesh.dp=2", "mesh.mp=4", "data.source=null")
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


def test_dp_auto_takes_all_devices():
    config = shmap_tp.load_config("model=test", "mesh.dp=auto", "mesh.mp=2")
    assert dict(shmap_tp.make_mesh(config).shape) == {"dp": 4, "mp": 2}
    assert shmap_tp.Model.initialize(config).config.mesh.dp == 4


def test_several_processes_are_refused():
    with pytest.raises(shmap_tp.UserError, match="one process; start several with shmap-tp train"):
        shmap_tp.Model.initialize(small(2, 4, "mesh.processes=2"))


# Model


@every_mode
def test_logits_are_those_of_the_dense_reference(mode):
    """Of a batch that dp does not divide and of sequences shorter than the context; padded columns are not returned."""
    model = shmap_tp.Model.initialize(small(2, 4, *MODES[mode]))
    tokens = sequences(3, 5)
    logits = model.logits(tokens)
    assert logits.shape == (3, 5, 50) and logits.dtype == np.float32
    with jax.enable_x64(True):
        expected = reference.transformer(in_float64(model.parameters), tokens, model.config.model)[..., :50]
    assert_close(logits, expected, RELATIVE["float32"])


@every_mode
def test_loss_and_gradients_are_those_of_the_dense_reference(mode):
    """Of a batch that dp does not divide, in which some targets are not counted."""
    model = shmap_tp.Model.initialize(small(2, 4, *MODES[mode]))
    tokens = sequences(3, 9)
    tokens[0, 6:] = -1
    loss, gradients = model.loss_and_gradients(tokens)

    def objective(p: dict) -> Any:
        return reference.objective(p, tokens, model.config.model, z_loss=0.01)

    with jax.enable_x64(True):
        expected, expected_loss = jax.jit(jax.grad(objective, has_aux=True))(in_float64(model.parameters))
    assert_close(loss, expected_loss, RELATIVE["float32"])
    assert_close(model.loss(tokens), expected_loss, RELATIVE["float32"])
    assert jax.tree.structure(gradients) == jax.tree.structure(model.parameters)
    assert_close(by_path(gradients), expected, RELATIVE["float32"])


@pytest.mark.parametrize(
    "shape, mode", [((1, 1), "all-reduce"), ((8, 1), "ZeRO-1"), ((1, 4), "sequence"), ((4, 2), "FSDP")]
)
def test_targets_that_are_not_counted_are_still_inputs(shape, mode):
    """Loss and gradients are those of the dense reference, whose inputs and targets are separate arrays."""
    model = shmap_tp.Model.initialize(small(*shape, *MODES[mode]))
    tokens, counted = sequences(4, 9), np.random.default_rng(1).random((4, 9)) < 0.5
    counted[0, :6], counted[3] = False, False  # a prompt, and a row of which nothing counts
    targets = np.where(counted, tokens, -1)[:, 1:]

    def objective(p: dict) -> Any:
        logits = reference.transformer(p, tokens[:, :-1], model.config.model)
        nll, logz = reference.cross_entropy(logits, targets, 50)
        loss = nll.sum() / (targets >= 0).sum()
        return loss + 0.01 * (logz**2).sum() / (targets >= 0).sum(), loss

    with jax.enable_x64(True):
        expected, expected_loss = jax.jit(jax.grad(objective, has_aux=True))(in_float64(model.parameters))
    loss, gradients = model.loss_and_gradients(tokens, counted)
    assert_close(loss, expected_loss, RELATIVE["float32"])
    assert_close(model.loss(tokens, counted.tolist()), expected_loss, RELATIVE["float32"])
    assert_close(by_path(gradients), expected, RELATIVE["float32"])


def test_the_padding_of_a_row_never_counts():
    model, tokens = shmap_tp.Model.initialize(small(2, 4)), sequences(3, 9)
    tokens[0, 6:] = -1
    for counted in (tokens >= 0, np.full((3, 9), True)):
        assert float(model.loss(tokens, counted)) == float(model.loss(tokens))


BAD_COUNTED = {
    "an id after -1": ([[1, -1, 2], [3, 4, -1]], None, "tokens[0, 1] is -1, but an id follows"),
    "another shape": ([[1, 2, 3]], [[True, True]], "counted must be bool[1, 3], one for each token, not bool[1, 2]"),
    "a mask": ([[1, 2]], np.ma.array([[True, True]], mask=[[False, True]]), "counted is a masked array"),
    "numbers": ([[1, 2, 3]], np.array([[1, 1, 0]]), "counted must be bool[1, 3], one for each token, not int64[1, 3]"),
}


@pytest.mark.parametrize("case", BAD_COUNTED)
def test_targets_that_cannot_be_used_are_explained(case):
    tokens, counted, expected = BAD_COUNTED[case]
    model = shmap_tp.Model.initialize(small(2, 4))
    for use in (model.loss, model.loss_and_gradients):
        with pytest.raises(shmap_tp.UserError, match=re.escape(expected)) as raised:
            use(tokens, counted)
        assert str(raised.value).count("\n") <= 1


def test_a_model_is_the_same_on_every_mesh():
    tokens = sequences(4, 9)
    first, *others = [shmap_tp.Model.initialize(small(*shape)) for shape in [(1, 1), (8, 1), (2, 2)]]
    for other in others:
        assert_same_bits(other.parameters, first.parameters)
        assert_close(other.loss(tokens), first.loss(tokens), RELATIVE["float32"])
        assert_close(other.logits(tokens[:, :-1]), first.logits(tokens[:, :-1]), RELATIVE["float32"])


def test_an_update_of_ones_own_lowers_the_loss():
    model, tokens = shmap_tp.Model.initialize(small(2, 4)), sequences(4, 9)
    loss, gradients = model.loss_and_gradients(tokens)
    updated = model.with_parameters(jax.tree.map(lambda w, dw: w - 0.1 * dw, model.parameters, gradients))
    assert float(updated.loss(tokens)) < float(loss) == pytest.approx(float(model.loss(tokens)))


BAD_TOKENS = {
    "one sequence": (np.zeros(5, int), "must be integers [batch, time], not int64[5]"),
    "no sequence": (np.zeros((0, 5), int), "must be integers [batch, time]"),
    "floats": (np.zeros((2, 5)), "must be integers [batch, time], not float64[2, 5]"),
    "too long": (np.zeros((2, 10), int), "tokens have 10 positions, and with model.context=8"),
    "an id of the padding": (np.full((2, 5), 50), "token id 50 is not in"),
    "a negative id": (np.full((2, 5), -2), "token id -2 is not in"),
    "a masked array": (np.ma.array([[1, 2]], mask=[[False, True]]), "are a masked array, whose mask has no effect"),
    "rows of different lengths": ([[1, 2], [3]], "must be integers [batch, time], but their rows have different len"),
}


@pytest.mark.parametrize("case", BAD_TOKENS)
def test_tokens_that_cannot_be_used_are_explained(case):
    tokens, expected = BAD_TOKENS[case]
    model = shmap_tp.Model.initialize(small(2, 4))
    for use in (model.logits, model.loss, model.loss_and_gradients):
        with pytest.raises(shmap_tp.UserError) as raised:
            use(tokens)
        assert expected in str(raised.value)


def test_a_list_given_to_load_config_is_explained():
    with pytest.raises(shmap_tp.UserError, match=r"not \['a=1'\]; give a list as load_config\(\*list\)"):
        inspect.unwrap(shmap_tp.load_config)(["a=1"])


def test_a_model_is_shown_in_one_line():
    assert repr(shmap_tp.Model.initialize(small(2, 4))).endswith(" parameters, mesh dp=2, mp=4)")
