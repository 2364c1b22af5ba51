"""Every layer on every mesh equals its dense reference: output, input gradient, and the gradient of every parameter."""

import pytest

from tests.helpers.layer_cases import LAYERS
from tests.helpers.model_fixtures import every_place
from tests.helpers.sharded_harness import compare


@every_place
@pytest.mark.parametrize("layer", LAYERS)
def test_layer_equals_its_dense_reference(layer, shape, precision):
    compare(LAYERS[layer], shape, precision)
