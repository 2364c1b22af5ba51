"""The way of data to the hosts of a pod, from text to a trained step, with stand-ins for gcloud and for the bucket."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.buckets import bucket_environment
from tests.helpers.paths import ROOT
from tests.helpers.run_fixtures import TINY

GCLOUD = f"""#!{sys.executable} -S
import os, pathlib, shutil, sys
assert sys.argv[1:3] == ["storage", "cp"] and sys.argv[-1].startswith("gs://") and sys.argv[-1].endswith("/"), sys.argv
target = pathlib.Path(os.environ["BUCKETS"], sys.argv[-1].removeprefix("gs://"))
target.mkdir(parents=True)
for file in sys.argv[3:-1]:
    shutil.copy(file, target)
"""


@pytest.fixture
def machine(tmp_path) -> dict[str, str]:
    """The environment of a machine with these stand-ins, on which `python` finds this project."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gcloud").write_text(GCLOUD)
    (tmp_path / "bin/gcloud").chmod(0o755)
    (tmp_path / "bin/python").symlink_to(sys.executable)
    return os.environ | {
        **bucket_environment(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{tmp_path}/bin:{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }


@pytest.mark.slow
def test_a_run_without_data_prints_the_commands_that_bring_it_to_the_bucket(tmp_path, machine):
    """They are run as printed; the same run then trains from the copy of the bucket on its own disk."""
    (tmp_path / "my.txt").write_text("".join(chr(1 + i % 62) for i in range(4000)))
    run = [
        sys.executable, str(ROOT / "main.py"), "--cfg", str(ROOT / "conf/config.yaml"), *TINY, "train.steps=2",
        "evaluate.every=0", "sample.prompts=[]", "data.name=mine", "data.source='--text my.txt --validation 0.2'",
        "data.dir=gs://my-bucket/mine", "run.dir=run",
    ]  # fmt: skip

    def start() -> subprocess.CompletedProcess:
        return subprocess.run(run, cwd=tmp_path, env=machine, capture_output=True, text=True, timeout=300)

    refused = start()
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 2, refused.stderr
    first, printed = refused.stderr.splitlines()
    assert first == "error: gs://my-bucket/mine/train.bin does not exist; prepare it and copy it there:"
    assert re.fullmatch(r"python -m shmap_tp.prepare .* && gcloud storage cp .*", printed)
    subprocess.run(["bash", "-euc", printed], cwd=tmp_path, env=machine, check=True, capture_output=True)

    done = start()
    assert done.returncode == 0, done.stderr
    assert "copying gs://my-bucket/mine to .cache/data/" in done.stdout
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 3  # two steps and an evaluation
    (copy,) = (tmp_path / ".cache/data").glob("*/meta.json")
    assert json.loads(copy.read_text())["source"] == "my.txt"
