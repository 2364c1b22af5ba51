"""Tests of a file that read the same model on the same mesh share its programs."""

import pytest

from tests.helpers.pretrained_models import BUILT, shared_model_functions


@pytest.fixture(scope="module", autouse=True)
def programs_are_shared(request: pytest.FixtureRequest):
    """But not where parts of the model are replaced."""
    with pytest.MonkeyPatch.context() as patch:
        if "mutations" not in request.module.__name__:
            patch.setattr("shmap_tp.api.build_model_functions", shared_model_functions)
        yield
    BUILT.clear()
