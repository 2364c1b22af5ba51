"""libtpu on a machine without a TPU, as the planner needs it."""

import importlib.util
import os

import pytest

from tests.helpers.fresh_process import python


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'")
@pytest.mark.skipif(os.environ.get("TPU_SKIP_MDS_QUERY") != "1", reason="this machine has a TPU")
def test_libtpu_prints_nothing_on_a_machine_without_a_tpu():
    script = "import shmap_tp.parallel.mesh, jax\nprint(jax.devices()[0].platform)"
    unset = dict.fromkeys(("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"))
    environment = {"JAX_PLATFORMS": "", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # also where another process has loaded it
    done = python(f"import os\n[os.environ.pop(name, None) for name in {[*unset]}]\n{script}", **environment)
    assert done.stdout.strip() in ("cpu", "gpu") and done.stderr == ""
