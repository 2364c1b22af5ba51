"""The constants of the formulas, fitted to the compiled steps of benchmarks/results.

    python benchmarks/formula_calibration.py

On models that were left out of the fit the time is off by 5 % in the median and 48 % at most, the memory by 2 % in the
median (0.87 to 1.13 times the compiled peak).  A constant is no efficiency: terms that grow together share what
they explain.  `excess` and `host_excess` are waiting that no compiled step has, so their constants are 1 by assumption.
"""

TIME = {
    "matmuls": 0.916,
    "kernel": 3.73,
    "chunked": 1.07,
    "scores": 11.8,
    "activations": 5.53,
    "weights": 1.56,
    "update": 7.07,
    "all_reduce": 2.95,
    "sequence": 1.31,
    "collective_matmul": 0.24,
    "gathers": 0.0,
    "scatters": 2.1,
    "once": 0.332,
    "host": 0.166,
    "excess": 1.0,
    "host_excess": 1.0,
}
"""By term of `formulas.time_terms`."""

MEMORY = {
    "state": 1.11,
    "saved": 0.987,
    "layer": 1.2,
    "gathered": 0.44,
    "copies": 0.603,
    "head": 0.224,
    "scores": 0.525,
}
"""By term of `formulas.memory_terms`."""

SCALE = {
    "TPU v3": 1.0,
    "TPU v4": 1.05,
    "TPU v5 lite": 0.966,
    "TPU v5": 0.969,
    "TPU v6 lite": 0.964,
    "NVIDIA H100 80GB HBM3": 1.06,
    "NVIDIA H200": 0.977,
}
"""What the time is multiplied by besides, by jax.Device.device_kind."""
