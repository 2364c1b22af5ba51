"""The console command `shmap-tp COMMAND ...`: each command is the module of that name, `python -m shmap_tp.COMMAND`."""

import runpy
import sys
from collections.abc import Sequence

from shmap_tp.runtime.exit_codes import INTERRUPTED

COMMANDS = {
    "train": "train a model, or continue training (the same as python main.py)",
    "prepare": "turn text into the token files that training reads",
    "report": "write a page about a run, or several side by side, for a browser",
    "plan": "predict speed, memory and communication on devices that are not there",
    "generate": "continue texts with a trained model",
    "chat": "talk to a model that was trained to chat",
    "evaluate": "loss and bits per byte of a trained model, or tasks of lm_eval",
    "pretrained": "look at Hugging Face checkpoints, and write them",
    "verify": "check checkpoints, resuming, and that replicated arrays agree",
}


def help_text() -> str:
    listed = "\n".join(f"  {name:<12}{what}" for name, what in COMMANDS.items())
    return (
        "usage: shmap-tp COMMAND [arguments]\n\n"
        "Tensor-parallel transformer training in JAX.\n\n"
        f"commands\n{listed}\n\n"
        "shmap-tp COMMAND --help has the arguments of each.  python -m shmap_tp is the same command."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: sys.argv[1:]) names.  A command that runs ends by SystemExit."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text())
        return 0
    name, *arguments = argv
    if name not in COMMANDS:
        print(f"error: shmap-tp has no command {name!r}\nuse one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if name == "train":
        from shmap_tp import train

        train.run(arguments, command="shmap-tp train")
    sys.argv = [name, *arguments]
    try:
        runpy.run_module(f"shmap_tp.{name}", run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
