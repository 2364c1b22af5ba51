"""Parameters and FLOPs of a block and an MLP of one's own are counted like those of the project."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from shmap_tp.config.schema import Mlp, Remat
from shmap_tp.model.components import ModelComponents
from shmap_tp.model.flops import (
    flops_per_token,
    forward_terms,
    parameter_terms,
    parameters,
    recomputed_terms,
)
from shmap_tp.model.matmul_count import UncountedError
from tests.helpers.components import ADAPTER, AdapterBlock, LoopMlp, ReGluMlp
from tests.helpers.named_models import TINY


@pytest.mark.parametrize("remat", Remat)
def test_an_mlp_of_three_matrices_is_counted_like_swiglu(remat):
    gelu = replace(TINY, mlp=Mlp.gelu, remat=remat)
    components = ModelComponents(mlp=ReGluMlp)
    swiglu = replace(gelu, mlp=Mlp.swiglu)
    assert parameter_terms(gelu, components=components) == parameter_terms(swiglu)
    assert forward_terms(gelu, components=components) == forward_terms(swiglu)
    assert recomputed_terms(gelu, components=components) == recomputed_terms(swiglu)
    assert flops_per_token(gelu, components=components) == flops_per_token(swiglu) != flops_per_token(gelu)


def test_a_block_of_ones_own_is_counted_as_by_hand():
    """TINY with four norms in each of two blocks, and two matrices [8, ADAPTER] more."""
    components, adapter = ModelComponents(block=AdapterBlock, mlp=ReGluMlp), 2 * 2 * 8 * ADAPTER
    terms = parameter_terms(TINY, components=components)
    assert terms["blocks.norms"] == 2 * 4 * 8
    assert terms["blocks.adapter_in"] + terms["blocks.adapter_out"] == adapter
    assert parameters(TINY, components=components) == parameters(TINY) + 2 * 2 * 8 + adapter
    assert flops_per_token(TINY, components=components) == flops_per_token(TINY) + 6 * adapter
    full = replace(TINY, remat=Remat.full)
    recomputed = recomputed_terms(full, components=components)
    assert recomputed["blocks"] == forward_terms(full, components=components)["blocks"] == 2880 + 672 + 2 * adapter
    attention = recomputed_terms(replace(TINY, remat=Remat.attention), components=components)
    assert attention["blocks"] == 448 + adapter, "gate, up, and adapter_in, which no policy saves"


class FourierMlp(ReGluMlp):
    def activate(self, gate, up):
        return gate * jnp.fft.fft(up).real


@pytest.mark.parametrize(
    "mlp, reason", [(LoopMlp, "in a while, so it is unknown how often"), (FourierMlp, "FLOPs of fft")]
)
def test_what_cannot_be_counted_is_refused(mlp, reason):
    with pytest.raises(UncountedError, match=reason):
        flops_per_token(TINY, components=ModelComponents(mlp=mlp))
