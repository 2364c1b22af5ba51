"""A program in the place of gcloud, which records its arguments and gives the answers that a test sets."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.paths import ROOT

SCRIPTS = ROOT / "scripts"
POD = str(SCRIPTS / "pod.sh")
STAND_IN = f"""#!{sys.executable} -S
import json, pathlib, shutil, sys
here = pathlib.Path(__file__).parent
if "scp" in sys.argv:
    source, target = sys.argv[5:7]
    (here / "mode").write_text(oct(pathlib.Path(source).parent.stat().st_mode & 0o777))
    shutil.copy(source, here / target)
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
answers = json.loads((here / "answers").read_text())
for i, (part, out, err, code) in enumerate(answers):
    if part in " ".join(sys.argv):
        if sum(one[0] == part for one in answers) > 1:
            del answers[i]  # the last answer of its kind is kept
            (here / "answers").write_text(json.dumps(answers))
        print(out, end="")
        print(err, end="", file=sys.stderr)
        sys.exit(code)
"""
HOST = "~/shmap_tp/scripts/on_host.sh"


class Cloud:
    """A directory on PATH whose gcloud is the stand-in."""

    def __init__(self, directory: Path):
        self.directory = directory
        (directory / "gcloud").write_text(STAND_IN)
        (directory / "gcloud").chmod(0o755)
        self.answer()

    def answer(self, *answers: tuple[str, str, str, int]) -> None:
        """(part of the command, stdout, stderr, exit code): the first match answers; equal parts once each, in turn."""
        (self.directory / "answers").write_text(json.dumps(answers))

    def pod(
        self, *arguments: str, code: int = 0, path: str | None = None, script: str = POD
    ) -> subprocess.CompletedProcess:
        path = path or f"{self.directory}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "TMPDIR": str(self.directory)}
        done = subprocess.run([script, *arguments], env=environment, capture_output=True, text=True)
        assert done.returncode == code, done
        return done

    def calls(self) -> list[list[str]]:
        """All commands since the last call of this method, without `compute tpus`."""
        file = self.directory / "calls"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        file.unlink(missing_ok=True)
        assert all(one[:2] == ["compute", "tpus"] for one in found)
        return [self.without_random_names(one[2:]) for one in found]

    def without_random_names(self, words: list[str]) -> list[str]:
        """`words` with {packed} in place of the archive, whose directory has a random name."""
        archive = re.compile(rf"{re.escape(str(self.directory))}/shmap_tp\.\w{{8}}/shmap_tp\.tar\.gz")
        return [archive.sub("{packed}", word) for word in words]
