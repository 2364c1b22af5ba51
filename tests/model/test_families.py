"""Models with the options of pretrained families equal an independent dense reference: logits, loss, every gradient.

Biases are not zero, and scales of norms are not one.
"""

import pytest

from tests.helpers.families import FAMILIES, MESHES, PARALLELISM, PLACES, RING
from tests.helpers.model_cases import compare_model

QUICK = (0, 2)
"""Of each family's places one is among the quick tests: all-reduces, or collective matmuls with FSDP, in turn; the
meshes differ from family to family.  Sequence parallelism with gradient rings is compared in float32 for all."""
places = [
    pytest.param(*place, marks=[] if i % len(PARALLELISM) == QUICK[i // len(PARALLELISM) % 2] else pytest.mark.slow)
    for i, place in enumerate(PLACES)
]


@pytest.mark.parametrize(("family", "shape", "settings"), places, ids=str)
def test_family_equals_its_dense_reference(family, shape, settings):
    compare_model(family, shape, "float64", *settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_its_dense_reference_in_float32(family):
    """In float64 where the output of every sublayer is normalised: there float32 differs by 5e-6 of the logits, and
    float64 does not."""
    precision = "float64" if family in ("gemma2 and 3", "olmo 3") else "float32"
    compare_model(family, (2, 4), precision, "mesh.tensor_parallel=sequence", *RING)


def test_places_cover_every_mesh_and_mode_of_every_family():
    for family in FAMILIES:
        assert {shape for name, shape, _ in PLACES if name == family} == set(MESHES)
        assert sum(name == family for name, _, _ in PLACES) == len(PARALLELISM)
    modes = {(settings[0], shape) for _, shape, settings in PLACES}
    assert len(modes) == 3 * len(MESHES)
