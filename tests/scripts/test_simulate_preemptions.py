"""scripts/simulate_preemptions.py: a run among random events loses nothing; what goodput is compared with."""

import runpy
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.paths import ROOT

SCRIPT = str(ROOT / "scripts" / "simulate_preemptions.py")


def kept_among_random_events(rate: float, losing: float, save: float, interval: float) -> float:
    """The share of the time that is kept, by drawing times of events."""
    generator = np.random.default_rng(0)
    seconds = generator.exponential(1 / rate, 200_000)
    cycles, rest = np.divmod(seconds, interval + save)
    at_a_loss = interval * cycles
    kept = np.where(generator.random(seconds.size) < losing, at_a_loss, at_a_loss + np.minimum(rest, interval))
    return float(kept.sum() / seconds.sum())


@pytest.mark.parametrize(("rate", "losing", "save"), [(0.1, 0.6, 0.5), (0.01, 1.0, 0.2)])
def test_the_optimum_is_the_most_that_random_events_leave(rate, losing, save):
    best, interval = runpy.run_path(SCRIPT)["optimum"](rate, losing, save)
    assert kept_among_random_events(rate, losing, save, interval) == pytest.approx(best, rel=0.01)
    for other in (interval / 2, 2 * interval):
        assert kept_among_random_events(rate, losing, save, other) < best - 0.01
    if losing == 1:
        assert interval == pytest.approx(np.sqrt(2 * save / rate), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--seed", "3", "--local", "2"], ["--seed", "4", "--same-mesh"]], ids=" ".join)
def test_a_run_among_preemptions_loses_nothing_and_equals_the_uninterrupted_one(arguments):
    given = ["--minutes", "1.5", "--mean", "15", "--step", "0.2", "--every", "5", *arguments]
    done = subprocess.run([sys.executable, SCRIPT, *given], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done
    assert "of the optimum\n" in done.stdout and done.stdout.endswith("no process is left\n")
