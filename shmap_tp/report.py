"""Write a page about a run, or about several side by side, that a browser opens without a network.

    python -m shmap_tp.report runs/first                    writes runs/first/report.html
    python -m shmap_tp.report runs/first runs/second        writes report.html: their curves, and what differs

It shows the loss by mesh, throughput, where the wall time went, samples, the configuration, the checkpoints and the
command that continues the run.  A training run writes the page of its own at its end, and renews it after evaluations.
The run may be under way.

exit codes: 0 done, 2 an error that is explained in one or two lines, 130 interrupted by Ctrl-C
"""

import argparse
import sys
from pathlib import Path

from shmap_tp.runtime.command_line import end_without_readers, importing, run_command
from shmap_tp.runtime.console import write_line


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m shmap_tp.report`."""
    top = argparse.ArgumentParser(
        prog="python -m shmap_tp.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    top.add_argument("--out", type=Path, metavar="FILE", help="the page (default: see above)")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_args(argv)
    return run_command(lambda: _report(arguments))


def _report(arguments: argparse.Namespace) -> None:
    with importing():
        from shmap_tp.training.run_report import REPORT, write_report

    runs = arguments.runs
    write_line(str(write_report(runs, arguments.out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT)))))


if __name__ == "__main__":
    sys.exit(end_without_readers(main))
