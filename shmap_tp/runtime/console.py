"""Printing in a run of several processes: only process 0 prints."""

import jax


def print_on_process_0(text: str) -> None:
    """Print a line and flush it, in process 0 only."""
    if jax.process_index() == 0:
        print(text, flush=True)
