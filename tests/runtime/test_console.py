"""What is printed while a progress bar is on the terminal."""

import io
import sys

from tqdm import tqdm

from shmap_tp.runtime.console import print_on_process_0


def test_a_line_replaces_the_progress_bar_and_the_bar_is_drawn_again_below_it(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with tqdm(total=10, initial=3, ncols=40, bar_format="{n_fmt}/{total_fmt} steps"):
        print_on_process_0("said")
        line, bar = terminal.getvalue().split("\n")
    before, cleared, said = line.rsplit("\r", 2)
    assert before.endswith("3/10 steps") and not cleared.strip() and said == "said"
    assert bar.endswith("\r3/10 steps")
