"""`python -m shmap_tp COMMAND ...`: the console command `shmap-tp`."""

import sys

from shmap_tp.cli import main

if __name__ == "__main__":
    sys.exit(main())
