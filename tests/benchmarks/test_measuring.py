"""Timing a step: seconds against a fake clock, bytes as the compiler counts them."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import measuring
import pytest
from measuring import WARM_UP, time_steps


def test_host_memory_is_not_counted_in_the_peak_of_a_measured_step():
    """With host offload the peak is bounded by the sum of all device allocations."""
    facts = {"argument_size_in_bytes": 5, "output_size_in_bytes": 4, "alias_size_in_bytes": 3, "temp_size_in_bytes": 2}
    for host, peak in [(0, 7), (100, 5 + (4 - 3) + 2)]:
        facts |= {"host_temp_size_in_bytes": host, "peak_memory_in_bytes": 7 + host}
        assert measuring.peak_bytes(SimpleNamespace(**facts)) == peak


# Seconds


@dataclass
class FakeDevice:
    """A device that executes its steps one after the other; the clock advances only when the host waits."""

    durations: list[float]
    dispatch: float
    """Seconds that the host needs to dispatch a step."""
    now: float = 0.0
    free: float = 0.0
    dispatched: list[float] = field(default_factory=list)
    waited: int = 0
    most_in_flight: int = 0

    def dispatch_step(self) -> dict[str, "Output"]:
        self.now += self.dispatch
        self.free = max(self.free, self.now) + self.durations[len(self.dispatched)]
        self.dispatched.append(self.free)
        self.most_in_flight = max(self.most_in_flight, sum(end > self.now for end in self.dispatched))
        return {"loss": Output(self, self.free), "grad_norm": Output(self, self.free)}


@dataclass(frozen=True)
class Output:
    device: FakeDevice
    ready: float

    def block_until_ready(self) -> "Output":
        self.device.now = max(self.device.now, self.ready)
        self.device.waited += 1
        return self


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("dispatch", [0.0, 0.5])
def test_a_step_is_timed_from_completion_to_completion(monkeypatch, steps, dispatch):
    """Dispatch overlaps the step before; warm-up steps and the first step after them are not timed."""
    durations = [float(2**i) for i in range(steps)]
    device = FakeDevice([100.0] * WARM_UP + [7.0] + durations, dispatch)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: device.now)
    assert time_steps(device.dispatch_step, steps) == pytest.approx(durations)
    assert len(device.dispatched) == WARM_UP + 1 + steps and device.waited == 2 * len(device.dispatched)
    assert device.most_in_flight <= 2, "emulated devices deadlock with many steps in flight"


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_shorter_than_their_dispatch_take_the_dispatch_time(monkeypatch, overlap):
    """Without overlap each step is awaited before the next: where dispatching computes the step, two are otherwise done
    before the first is awaited, and the second took no time."""
    device = FakeDevice([0.25 if overlap else 0.0] * 9, dispatch=1.0)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: device.now)
    assert time_steps(device.dispatch_step, 4, overlap=overlap)[:-1] == pytest.approx([1.0] * 3)
    assert overlap or device.most_in_flight <= 1
