"""Where the repository is, and which files belong to it."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def project_files() -> list[str]:
    """The files of the working tree without ignored ones, relative to ROOT; of an unpacked archive, all but caches."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        return [name for name in names if name and (ROOT / name).is_file()]
    generated = [ROOT / "data", ROOT / "runs", ROOT / "build"]
    found = []
    for folder, folders, names in os.walk(ROOT):
        hidden = {name for name in folders if name.startswith(".") or name == "__pycache__"}
        folders[:] = [name for name in folders if name not in hidden and Path(folder, name) not in generated]
        found += [str(Path(folder, name).relative_to(ROOT)) for name in names]
    return sorted(found)
