"""How much longer published runs took than the step predicted for the same work, by TPU version.

The figures are those of benchmarks/results/published.jsonl; RESULTS.md lists each run, and how well the constant of a
version, fitted on other models, foretells a run that was left out.  A ratio contains both the difference between the
programs and the error of the prediction: it is the only measured bound that there is.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """Published seconds / seconds predicted for our step, over the runs that shard the same work the same way."""

    constant: float
    """Geometric mean of the ratios."""
    lowest: float
    highest: float
    runs: int


CALIBRATIONS = {
    "TPU v2": Calibration(1.10, 1.10, 1.10, 1),
    "TPU v3": Calibration(1.19, 1.08, 1.24, 3),
    "TPU v4": Calibration(1.11, 1.11, 1.11, 1),
    "TPU v5 lite": Calibration(1.24, 1.18, 1.30, 8),
    "TPU v5": Calibration(1.12, 1.08, 1.16, 4),
    "TPU v6 lite": Calibration(1.12, 1.05, 1.18, 10),
    "TPU7x": Calibration(1.14, 1.13, 1.14, 2),
}
"""By jax.Device.device_kind."""


def format_calibration(device_kind: str, step_seconds: float) -> str:
    """One line: what a step predicted to take `step_seconds` takes if published runs are a guide."""
    found = CALIBRATIONS.get(device_kind)
    if found is None:
        return f"not calibrated: no published run on {device_kind} was compared"
    spread = f"{found.lowest:.2f} to {found.highest:.2f}" if found.runs > 1 else f"{found.constant:.2f}"
    runs = f"{found.runs} published runs" if found.runs > 1 else "the one published run"
    return (
        f"{runs} on {device_kind} took {spread} times the predicted step; "
        f"times {found.constant:.2f} this is {found.constant * step_seconds:.3f} s"
    )
