"""The search of the planner: its candidates, what the formulas drop, and which candidates are compiled."""

import math
from argparse import Namespace
from dataclasses import dataclass, replace

import pytest

from shmap_tp.config.choices import FsdpGradients, MatmulPrecision, Remat, SavedActivation, Zero
from shmap_tp.errors import UserError
from shmap_tp.plan.report import Row
from shmap_tp.plan.search.candidates import (
    KEYS,
    MEMORY_MARGIN,
    PRECISION,
    SURE,
    TIME_MARGIN,
    Candidate,
    Result,
    candidates,
    pareto_front,
    pruned,
    sibling,
)
from shmap_tp.plan.search.command import Space, finish, make_search
from shmap_tp.plan.search.compiling import WORTH_TRYING, Search, ended
from shmap_tp.plan.search.output import Cost, Task, largest_share, limited_by, table
from shmap_tp.plan.targets import find_target, machine_of
from tests.helpers.searching import RECORDED, config, made

# Candidates


def searched(given: dict[str, str], *settings: str, version: str = "v5e", devices: int = 8) -> list[Candidate]:
    return candidates(config(*settings), find_target(version, devices, None, 1), given)


def test_every_candidate_is_valid_and_its_settings_make_the_same_configuration():
    found = searched({})
    assert len(found) == len(set(found)) > 100
    assert {one.dp * one.mp for one in found} == {8} and {one.remat for one in found} >= {Remat.full, Remat.none}
    assert {one.fsdp_gradients for one in found if one.zero == Zero.fsdp} == set(FsdpGradients)
    for one in found[:: len(found) // 40]:
        assert config(*one.settings()) == one.apply(config())


def test_experts_are_searched_over_mp_and_over_ranks_of_tokens():
    experts = ("model.block=sequential", "model.mlp=swiglu", "model.experts=4", "model.mlp_bias=false")
    found = searched({"model.remat": "full"}, *experts)
    assert {(one.mp, one.ep) for one in found} == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
    for one in found[:: len(found) // 10]:
        assert config(*experts, *one.settings()) == one.apply(config(*experts))
    given = searched({"model.remat": "full", "mesh.ep": "4"}, *experts)
    assert given == [one for one in found if one.ep == 4]


def test_keys_that_are_given_are_not_searched():
    given = {"mesh.mp": "2", "model.remat": "full", "model.offload": "[]", "mesh.zero": "fsdp"}
    found = searched(given)
    assert found and {(one.mp, one.remat, one.offload, one.zero) for one in found} == {(2, Remat.full, (), Zero.fsdp)}
    assert given.keys() <= set(KEYS)
    row_major = searched(given | {"model.row_major": "true"})
    assert row_major == [replace(one, row_major=True) for one in found] == searched(given, "model.row_major=true")
    assert row_major[0].apply(config()).model.row_major and "model.row_major=true" in row_major[0].settings()
    assert "model.row_major=false" in found[0].settings(row_major=True)
    for order in ("[input,up]", "[up, input]"):
        found = searched(given | {"model.remat": "mlp", "model.offload": order})
        assert found and {one.offload for one in found} == {(SavedActivation.input, SavedActivation.up)}


def test_precisions_are_searched_where_they_are_given():
    given = {"mesh.mp": "1", "model.remat": "full", "mesh.zero": "fsdp"}
    plain, int8 = searched(given), searched(given, "train.matmul_precision=int8")
    assert {one.matmul_precision for one in plain} == {MatmulPrecision.bfloat16}
    assert {*searched(given | {PRECISION: "bfloat16,int8"})} == {*plain, *int8} and len(int8) == len(plain)
    assert searched(given | {PRECISION: "int8"}) == int8
    assert config(*int8[0].settings()) == int8[0].apply(config())
    of_file = int8[0].settings(precision=MatmulPrecision.int8), plain[0].settings(precision=MatmulPrecision.int8)
    assert [f"{PRECISION}=bfloat16" in of_file[1], "matmul_precision" in str(of_file[0])] == [True, False]
    part = searched(given, "train.matmul_precision=int8", "train.matmul_scope=mlp")
    assert part == int8, "the base of the candidates is valid in eight bits alone"
    for wrong, rule in (("fp8", "TPU v5 lite has no units"), ("int4", "int4 is none of bfloat16, int8, fp8")):
        with pytest.raises(UserError, match=rule):
            searched({PRECISION: wrong})


@pytest.mark.parametrize("given", ["mesh.tensor_parallel=sequence", "mesh.zero=fsdp", "mesh.zero=zero1"])
def test_a_choice_that_is_given_leaves_all_meshes(given):
    """Also those with one rank along the axis, where every choice does the same."""
    found = searched(dict([given.split("=")]) | {"model.remat": "full"}, devices=4)
    assert {(one.dp, one.mp) for one in found} == {(4, 1), (2, 2), (1, 4)}


def test_nothing_is_offloaded_where_no_step_with_offload_has_been_compiled():
    for version, offloads in {"v3": False, "h100": False, "v5e": True}.items():
        found = searched({"mesh.mp": "1"}, version=version)
        assert found and any(one.offload for one in found) == offloads, version


# Pruning


def test_a_candidate_is_dropped_for_one_of_three_reasons():
    limit = 10.0
    fits, full = made(1, 1.0, SURE * limit), made(2, 0.9, MEMORY_MARGIN * limit)
    large, slow = made(3, 0.5, MEMORY_MARGIN * limit * 1.01), made(4, TIME_MARGIN * 1.01, 1.0)
    offload = (SavedActivation.input,)
    useless, useful = made(1, 1.1, 0.95 * limit, offload), made(2, 1.0, 5.0, offload)
    kept, dropped, front = pruned([fits, full, large, slow, useless, useful], limit * 1e9, 1e9)
    assert kept == [full, fits, useful] and front == [full, useful, slow]
    assert dropped == {"too large": 1, "another offload is better": 1, "too slow": 1}


def test_a_candidate_that_needs_more_host_memory_than_there_is_is_dropped():
    kept, *_ = pruned([made(1, 1.0, 5.0, (SavedActivation.input,), host=2e9), made(2, 1.0, 5.0)], 10e9, 1e9)
    assert [one.candidate.microbatches for one in kept] == [2]


# Which candidates are compiled


class FakeJob:
    """A compilation that takes `seconds` of the clock of `Compiler`."""

    def __init__(self, compiler: "Compiler", estimated: Result):
        self.compiler, self.end, self.estimated = compiler, compiler.now + compiler.takes, estimated

    def poll(self) -> Result | None:
        if self.compiler.now < self.end:
            return None
        truth = self.compiler.truth.get(self.estimated.candidate.microbatches)
        return compiled(self.estimated, truth and row(*truth), self.compiler.takes)

    def stop(self) -> None:
        self.compiler.ended.append(self.estimated)


@dataclass(frozen=True)
class Ended:
    """A compilation that has ended."""

    result: Result

    def poll(self) -> Result:
        return self.result

    def stop(self) -> None:
        pass


class Compiler:
    """A clock and compilations whose results, by number of microbatches, are (seconds, peak GB) or None."""

    def __init__(self, truth: dict[int, tuple[float, float] | None], takes: float = 60.0):
        self.truth, self.takes, self.now = truth, takes, 0.0
        self.started, self.ended, self.lines, self.saved, self.states = [], [], [], [], []

    def start(self, estimated: Result) -> FakeJob:
        self.started.append(estimated.candidate.microbatches)
        return FakeJob(self, estimated)

    def sleep(self, _: float) -> None:
        self.now += 1.0

    def search(self, estimates: list[Result], jobs: int = 1, seconds: float = 3600.0, **more) -> Search:
        return Search(
            estimates, 10e9, self.start, self.lines.append, jobs, seconds, save=self.saved.append, **more,
            progress=self.states.append, clock=lambda: self.now, sleep=self.sleep,
        )  # fmt: skip


def compiled(estimated: Result, row: Row | None, takes: float = 60.0) -> Result:
    return replace(estimated, row=row, error=None if row else "exit code 1: crash", compile_seconds=takes)


def row(seconds: float, gigabytes: float) -> Row:
    fits = gigabytes <= 10
    return replace(
        RECORDED, tokens_per_step=1000, fits=fits, step_seconds=seconds if fits else None,
        peak_bytes_per_device=gigabytes * 1e9, limit_bytes_per_device=10e9,
    )  # fmt: skip


def name_of(result: Result | None) -> int | None:
    return result and result.candidate.microbatches


TRUTH, ALONE = {1: (1.0, 5), 2: (1.2, 5), 3: (2.0, 5), 4: (1.3, 5)}, {1: (1.0, 5)}
STOPPED, NO_TIME = "nothing faster is expected", "too little time for another"
ORDERS = {
    "the fastest by formulas first, until nothing faster is expected": (
        TRUTH, [(3, 2.0, 5), (2, WORTH_TRYING - 0.01, 5), (4, 1.3, 5), (1, 1.0, 5)], {}, [1, 2], 1, STOPPED,
    ),
    "what surely fits first, and what may not fit after it": (
        {1: (1.0, 9.9), 2: (1.3, 5)}, [(1, 1.0, 9.7), (2, 1.3, 5), (3, 1.9, 2)], {}, [2, 1], 1, STOPPED,
    ),
    "where none surely fits, the smallest first": (
        {1: (1.0, 9.9), 2: (1.3, 5)}, [(1, 1.0, 9.9), (2, 1.3, 9.6)], {}, [2, 1], 1, STOPPED,
    ),
    "others after what does not fit and what cannot be compiled": (
        {1: (1.0, 12), 2: None, 3: (1.02, 5)}, [(1, 1.0, 9), (2, 1.01, 5), (3, 1.02, 5)], {}, [1, 2, 3], 3, STOPPED,
    ),
    "none that a peak which was estimated too low teaches not to fit": (
        {1: (1.0, 20), 2: (1.01, 20), 3: (2.0, 4)}, [(1, 1.0, 9), (2, 1.01, 9), (3, 2.0, 2)], {}, [1, 3], 3, STOPPED,
    ),
    "others by the formulas times the ratio of the fastest": (
        {1: (0.5, 5), 2: (0.6, 5), 3: (0.4, 5)}, [(1, 1.0, 5), (2, 1.05, 5), (3, 1.09, 5), (4, 1.3, 5)], {}, [1, 2, 3],
        3, STOPPED,
    ),
    "none that would not end in time": (
        ALONE | {2: (0.9, 5)}, [(1, 1.0, 5), (2, 1.0, 5)], {"seconds": 90.0}, [1], 1, NO_TIME,
    ),
    "none to its end after the time is up": (ALONE, [(1, 1.0, 5)], {"seconds": 50.0}, [1], None, "the time is up"),
    "in a search of several, more than its share until one fits": (
        {1: (1.0, 12), 2: (1.1, 5)}, [(1, 1.0, 8.9), (2, 1.1, 5), (3, 1.11, 5)], {"seconds": 30.0, "longest": 200.0},
        [1, 2], 2, "the time is up",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ORDERS)
def test_the_search_compiles(case):
    truth, estimates, more, started, best, stopped = ORDERS[case]
    compiler = Compiler(truth)
    search = compiler.search([made(*one) for one in estimates], seconds=more.get("seconds", 3600.0))
    search.longest = more.get("longest", search.longest)
    search.run()
    assert (compiler.started, name_of(search.best()), search.stopped) == (started, best, stopped)
    assert [name_of(one) for one in compiler.ended] == ([] if best else [1])
    assert best or [name_of(one) for one in search.remaining] == [1], "the formulas still rank it"


def test_a_search_says_what_it_compiles_and_what_comes_of_it():
    compiler = Compiler({1: (0.0012, 12), 2: None, 3: (1.02, 5)})
    compiler.search([made(1, 0.0012, 9), made(2, 1.01, 5), made(3, 1.02, 5)]).run()
    assert [line.split()[0] for line in compiler.lines] == ["compiling", "60"] * 3 and len(compiler.saved) == 3
    assert compiler.lines[0].endswith("expected 0.0012 s a step")
    assert "does not fit: needs 11.18 of 9.31 GiB" in compiler.lines[1]
    assert "not compiled: exit code 1: crash" in compiler.lines[3]
    assert "1 compiling, 0 compiled, none fits yet, 60 min left" in compiler.states


def test_what_the_formulas_cannot_tell_from_the_fastest_is_tried_beside_it_alone():
    compiler = Compiler({1: (1.0, 5), 11: (0.95, 5), 2: (1.05, 5), 12: (0.5, 5)})
    siblings = lambda one: [made((one.candidate.microbatches + 10) % 20, one.estimate.seconds, 5)]  # noqa: E731
    search = compiler.search([made(1, 1.0, 5), made(2, 1.05, 5)], siblings=siblings)
    search.run()
    assert sorted(compiler.started) == [1, 2, 11] and search.best().seconds == 0.95
    assert len(search.remaining) == 0, "each is known once"


def test_a_search_tries_row_major_beside_the_fastest_unless_it_is_given_or_has_no_effect(monkeypatch):
    fastest, arguments = made(1, 1.0, 5), Namespace(overrides=[], microbatches=None, precisions=None, jobs=1)
    monkeypatch.setattr("shmap_tp.plan.search.command.jobs_at_a_time", lambda: 1)

    def tried(version: str) -> list[Result]:
        space = Space(Task(config(), find_target(version, 8, None, 1)), [fastest], fastest)
        return make_search(space, arguments, 1.0, 1.0).siblings(fastest)

    assert tried("v5e") == [replace(fastest, candidate=replace(fastest.candidate, row_major=True))]
    assert sibling(*tried("v5e")) == fastest and str(tried("v5e")[0].candidate).endswith(", row-major")
    assert tried("h100") == []
    arguments.overrides.append("model.row_major=true")
    assert tried("v5e") == []


def test_after_a_near_miss_the_answer_is_the_fastest_that_surely_fits_by_formulas():
    compiler = Compiler({1: (1.0, 10.1)})
    search = compiler.search([made(1, 1.0, 9.0), made(2, 1.2, 9.0), made(3, 1.5, 5), made(4, 2.0, 4)], seconds=90.0)
    search.run()
    assert compiler.started == [1] and search.best() is None and search.stopped == "too little time for another"
    assert search.answer().candidate.microbatches == 3, "the near miss teaches that 2 may not fit either"


def test_a_stop_keeps_what_was_found():
    compiler = Compiler({1: (1.0, 5), 2: (1.0, 5)})

    def interrupt(_: float) -> None:
        compiler.now += 1.0
        if compiler.now > 70:
            raise KeyboardInterrupt

    search = compiler.search([made(1, 1.0, 5), made(2, 1.0, 5)])
    search.sleep = interrupt
    with pytest.raises(KeyboardInterrupt):
        search.run()
    assert search.best().seconds == 1.0 and search.stopped == "stopped" and len(compiler.ended) == 1


def test_several_are_compiled_at_a_time():
    compiler = Compiler({name: (1.0, 5) for name in range(1, 5)})
    compiler.search([made(name, 1.0, 5) for name in range(1, 5)], jobs=2).run()
    assert compiler.now == pytest.approx(121, abs=2), "four of 60 s, two at a time"


def test_a_compilation_that_lacked_memory_is_repeated_with_fewer_at_a_time():
    compiler = Compiler({1: (1.0, 5), 2: (1.01, 5)})
    search = compiler.search([made(1, 1.0, 5), made(2, 1.01, 5)], jobs=2)
    lacking = [-9]
    real = search.start
    search.start = lambda one: Ended(ended(one, lacking.pop(), "", "", 1.0)) if lacking else real(one)
    search.run()
    assert search.jobs == 1 and compiler.started == [2, 1] and search.best().seconds == 1.0
    assert "from here on 1 at a time; this one is compiled again" in compiler.lines


# Output

TARGET = find_target("v5e", 16, None, 1)
LIMIT = machine_of(TARGET).memory / 1e9
"""Gigabytes of a device."""


def in_table(seconds: float, part: float, *, is_compiled: bool = False) -> Result:
    """A candidate whose peak is this part of the memory of a device."""
    by_formulas = made(1, seconds, part * LIMIT)
    if not is_compiled:
        return replace(by_formulas, estimate=replace(by_formulas.estimate, time_terms={"update": seconds}))
    fits = math.isfinite(seconds)
    peak = {"peak_bytes_per_device": part * LIMIT * 1e9, "step_seconds": seconds if fits else None}
    return compiled(by_formulas, replace(RECORDED, tokens_per_step=1000, fits=fits, **peak))


def test_a_candidate_fits_if_the_compiler_says_so_or_the_formulas_leave_a_margin():
    fits = [
        one.fits_in(LIMIT * 1e9)
        for one in (
            in_table(1.0, 1.01, is_compiled=True),
            in_table(math.inf, 1.2, is_compiled=True),
            in_table(1.0, 0.89),
            in_table(1.0, 0.91),
            compiled(in_table(1.0, 0.89), None),
        )
    ]
    assert fits == [True, False, True, False, False]


def test_what_may_fit_is_not_said_to_be_too_large(capsys):
    task, near = Task(config(), TARGET), in_table(1.0, 0.95)
    search = Compiler({}).search([near])
    search.limit_bytes = LIMIT * 1e9
    assert finish(Space(task, [near], near), Namespace(), search) is None
    printed = " ".join(capsys.readouterr().out.split())
    assert "nothing surely fits by formulas; the smallest, (4, 1) zero1, 1 mb, remat full, needs about" in printed
    assert printed.endswith("some that were not compiled may fit: a compilation would tell")


def test_the_pareto_front_has_what_no_other_beats_in_both():
    fast, small, both, slow = made(1, 1.0, 9), made(2, 2.0, 3), made(3, 1.5, 9.5), made(4, 2.0, 4)
    assert pareto_front([slow, both, small, fast]) == [fast, small]


def test_waiting_for_the_host_is_named_where_it_limits_a_step():
    scopes = {"mlp": 7.0, "waiting for the host, reads": 1.0, "waiting for the host, writes": 2.0}
    assert largest_share(replace(RECORDED, step_seconds=10.0, scopes=scopes)) == "waiting for the host 30%"
    assert limited_by(in_table(math.inf, 1.2, is_compiled=True), LIMIT * 1e9) == "memory: does not fit"
    assert limited_by(in_table(1.0, 1.2), LIMIT * 1e9) == "memory: may not fit"


def test_the_table_marks_the_front_and_adds_time_and_cost(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    task = Task(
        config("train.batch=125", "train.microbatches=1", "model.context=8"),
        TARGET,
        Cost(8.64e10, 2.0, 16, "TPU v5 lite"),
    )
    too_small = in_table(math.inf, 1.2, is_compiled=True)
    text = table(task, [in_table(0.9, 1.1), in_table(1.0, 0.8), too_small, in_table(1.5, 0.85)])
    head, first, second, too_large, unfit = text.splitlines()
    assert head.split()[-3:] == ["days", "dollars", "candidate"] and "limited by" not in head, "of 100 columns"
    assert first.startswith("*") and second.startswith(" ") and unfit.startswith(" ")
    assert "0.900" in too_large, "what may not fit comes after what fits"
    assert "1,240.0" in first and "952,320" in first, "1,000 days by the predicted step; 16 chips at 2 dollars an hour"
    assert unfit.split()[0] == "-" and unfit.split().count("-") >= 3, "no step, no days, no dollars"
