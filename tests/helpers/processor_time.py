"""Processor seconds of a run of the tests, by directory, so that growth is seen when it happens."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def processor_seconds() -> float:
    """Seconds of this process and of the ended processes that it had started."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class ProcessorTime:
    """Measures each test where it runs, and prints the sums where the run was started; pytest-xdist carries the
    attribute of a report from its workers.  What collecting the tests takes is the difference to the whole."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()
        self.since = 0.0

    def pytest_runtest_logstart(self) -> None:
        self.since = processor_seconds()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """After the set-up, the call and the teardown of a test."""
        outcome: Any = yield
        now = processor_seconds()
        outcome.get_result().processor_seconds = now - self.since
        self.since = now

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "processor_seconds"):  # a worker that died
            return
        directory = str(Path(report.nodeid.partition("::")[0]).parent)
        self.seconds[directory] += report.processor_seconds
        self.tests[directory] += report.when == "teardown"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.tests.total() < 2:
            return
        terminalreporter.section("processor seconds of the tests, by directory")
        for directory, seconds in self.seconds.most_common():
            terminalreporter.write_line(f"{seconds:8.1f}  {self.tests[directory]:5}  {directory}")
        terminalreporter.write_line(f"{self.seconds.total():8.1f}  {self.tests.total():5}  all")
