"""Configurations and candidates for tests of the planner's search."""

from dataclasses import replace

from result_format import read_rows

from shmap_tp.config.choices import FsdpGradients, TensorParallelMode, Zero
from shmap_tp.config.schema import Config
from shmap_tp.plan.report import Row
from shmap_tp.plan.search.candidates import Candidate, Result
from shmap_tp.plan.search.formulas import Estimate
from tests.helpers import model_fixtures

BASE = Candidate(4, 1, 1, 1, TensorParallelMode.all_reduce, Zero.zero1, FsdpGradients.reduce_scatter, 1)
RECORDED = Row(**next(row for row in read_rows("tpu") if row["kind"] == "predicted"))


def config(*settings: str) -> Config:
    """The small model on one device, with 16 sequences of 8 tokens a step."""
    sizes = "train.batch=16 mesh.dp=1 mesh.mp=1 mesh.processes=1 model.context=8 model.vocabulary=64"
    return model_fixtures.config(*sizes.split(), *settings)


def made(name: int, seconds: float, gigabytes: float, offload: tuple = (), host: float = 0.0) -> Result:
    """A candidate with `name` microbatches."""
    estimate = Estimate(seconds, gigabytes * 1e9, host, {}, {"state": 1e9})
    return Result(replace(BASE, microbatches=name, offload=offload), estimate)
