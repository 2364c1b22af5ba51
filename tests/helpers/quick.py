"""Which tests `pytest -m quick` runs."""

from pathlib import Path

QUICK = {
    "benchmarks": ["test_sweep"],
    "config": ["test_compose", "test_validate"],
    "data": ["test_batches", "test_prepare", "test_prepare_refusals", "test_staging", "test_token_files"],
    "inference": ["test_length_batches", "test_sampling"],
    "hardware": ["test_devices", "test_torus"],
    "layers": ["test_positions", "test_xla_workarounds"],
    "model": ["test_flops", "test_named_models"],
    "parallel": ["test_mesh", "test_collective_matmul"],
    "plan": [
        "test_calibration",
        "test_compiled_communication",
        "test_instruction_costs",
        "test_link_model",
        "test_search",
        "test_topologies",
    ],
    "pretrained": ["test_tensor_files"],
    "runtime": ["test_files"],
    "scripts": ["test_on_host", "test_pod_setup", "test_slurm"],
    "silent_bugs": ["test_document", "test_norms_and_updates"],
    "tests": ["test_architecture", "test_console_command", "test_quick", "test_recipes", "test_vocabulary"],
    "training": ["test_goodput", "test_optimizer", "test_weights_and_biases"],
}
"""Directory of tests -> its files with the marker `quick`, the cheapest ones; together 70 processor seconds."""


def is_quick(file: Path) -> bool:
    return file.stem in QUICK.get(file.parent.name, [])
