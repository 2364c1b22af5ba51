"""How the search judges its formulas: rank correlation, what compiled steps teach, expected improvement."""

import math
from dataclasses import replace

import numpy as np
import pytest

from shmap_tp.config.schema import FsdpGradients, Remat, SavedActivation, TensorParallelMode, Zero
from shmap_tp.plan.search.candidates import Candidate
from shmap_tp.plan.search.loop import Correction, Errors, expected_improvement, rank_correlation
from tests.helpers.searching import BASE


def test_rank_correlation():
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]) == pytest.approx(1)
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert rank_correlation([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]) == pytest.approx(0.5)
    assert rank_correlation([1.0, 1.0, 2.0], [1.0, 1.0, 2.0]) == pytest.approx(1), "ties share their mean rank"
    assert math.isnan(rank_correlation([1.0], [1.0])) and math.isnan(rank_correlation([1.0, 1.0], [1.0, 2.0]))


def test_a_correction_follows_the_most_alike_candidates_and_what_is_common_to_all():
    near = replace(BASE, remat=Remat.none)
    far = Candidate(1, 4, 1, 1, TensorParallelMode.sequence, Zero.fsdp, FsdpGradients.ring, 2, Remat.mlp)
    errors = Errors(common=0.08, choice=0.02, own=0.03)
    assert Correction(errors, []).of(BASE) == (0.0, errors.total)
    slower = Correction(errors, [(near, 1.2)])
    (log_near, deviation_near), (log_far, deviation_far) = slower.of(BASE), slower.of(far)
    assert 0.5 * math.log(1.2) < log_far < log_near < math.log(1.2), "all are slower, those alike most"
    assert slower.of(replace(BASE, offload=(SavedActivation.input,)))[0] < log_near, "each choice in common counts"
    assert deviation_near < deviation_far < errors.total
    both = Correction(errors, [(near, 1.2), (far, 1.0)])
    assert both.of(near)[0] == pytest.approx(math.log(1.2), rel=0.1)
    assert both.of(far)[0] == pytest.approx(0.0, abs=0.01)


def test_expected_improvement_is_the_mean_of_what_is_above_zero():
    draws = np.random.default_rng(0).normal(0.1, 0.2, 1_000_000)
    assert expected_improvement(0.1, 0.2) == pytest.approx(np.maximum(draws, 0).mean(), rel=0.01)
    assert expected_improvement(-1.0, 0.1) == pytest.approx(0.0, abs=1e-9)
