"""Printing: only process 0 of a run prints, and a progress bar on the terminal stays below what is printed."""

import sys

from tqdm import tqdm

from shmap_tp.runtime.wrapping import wrapped


def print_on_process_0(text: str) -> None:
    """Print a line and flush it, in process 0 only."""
    import jax  # here, since what is prepared needs no JAX, and each of its processes would wait for the import

    if jax.process_index() == 0:
        write_line(text)


def write_line(text: str) -> None:
    """Print a line and flush it, broken between words in a terminal.  A progress bar that is there is taken away and
    drawn again below."""
    tqdm.write(wrapped(text, sys.stdout))
    sys.stdout.flush()
