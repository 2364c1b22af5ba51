"""scripts/kubernetes: the JobSets have what their public schema requires, nothing unknown, and runs that would train.

The schema: config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of github.com/kubernetes-sigs/jobset, v1alpha2, as
far as these files use it.
"""

import math
import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from shmap_tp import train
from shmap_tp.check import check_mesh, check_places
from shmap_tp.config.compose import load
from shmap_tp.config.schema import Config
from shmap_tp.config.validate import validate_process_arguments
from shmap_tp.hardware.devices import find_slices
from tests.helpers.paths import ROOT

HERE = ROOT / "scripts" / "kubernetes"
FILES = [HERE / "tpu.yaml", HERE / "gpu.yaml"]
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)

JOB = ".spec.replicatedJobs[].template.spec"
POD = f"{JOB}.template.spec"
SCHEMA = {
    "": ".apiVersion:str .kind:str .metadata.name:str"
    " .metadata.annotations.alpha.jobset.sigs.k8s.io/exclusive-topology:str",
    ".spec": ".failurePolicy.maxRestarts:int .failurePolicy.rules[].name!:str .failurePolicy.rules[].action!:str"
    " .failurePolicy.rules[].onJobFailureReasons[]:str .replicatedJobs[].name!:str .replicatedJobs[].replicas:int"
    " .replicatedJobs[].template!",
    JOB: ".parallelism:int .completions:int .backoffLimit:int .template! .podFailurePolicy.rules!",
    f"{JOB}.podFailurePolicy.rules[]": ".action!:str .onExitCodes.containerName:str .onExitCodes.operator!:str"
    " .onExitCodes.values![]:int",
    POD: ".restartPolicy:str .terminationGracePeriodSeconds:int .containers! .volumes[].name!:str"
    " .volumes[].emptyDir.medium:str .nodeSelector.cloud.google.com/gke-tpu-accelerator:str"
    " .nodeSelector.cloud.google.com/gke-tpu-topology:str",
    f"{POD}.containers[]": ".name!:str .image!:str .command[]:str .args[]:str .env[].name!:str .env[].value:str"
    " .volumeMounts[].name!:str .volumeMounts[].mountPath!:str"
    " .resources.requests.google.com/tpu:int .resources.limits.google.com/tpu:int"
    " .resources.requests.nvidia.com/gpu:int .resources.limits.nvidia.com/gpu:int",
}  # fmt: skip
"""Path of an object -> the values in it, with their types; a key with ! is required."""
EVERY = [f"{place}{path}" for place, paths in SCHEMA.items() for path in paths.split()]
KNOWN = {path.replace("!", "") for path in EVERY if ":" in path}
REQUIRED = {path.rpartition("!")[0].replace("!", "") for path in EVERY if "!" in path}


def parts(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The objects, lists and values of a document, with their paths."""
    yield place, value
    if isinstance(value, list):
        for part in value:
            yield from parts(part, f"{place}[]")
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from parts(part, f"{place}.{name}")


def faults(document: Any) -> list[str]:
    """Where a document differs from the schema."""
    found = [*parts(document)]
    values = {f"{place}:{type(value).__name__}" for place, value in found if not isinstance(value, dict | list)}
    required = [each.rpartition(".") for each in REQUIRED]
    missing = [f"{place}.{name} is missing" for place, value in found for parent, _, name in required
               if place == parent and name not in value]  # fmt: skip
    return [*missing, *sorted(values - KNOWN), *(f"{place} is empty" for place, value in found if value in ([], {}))]


class Run:
    """What a JobSet starts."""

    def __init__(self, file):
        self.set = yaml.safe_load(file.read_text())
        (self.replicated,) = self.set["spec"]["replicatedJobs"]
        self.job = self.replicated["template"]["spec"]
        self.pod = self.job["template"]["spec"]
        (self.container,) = self.pod["containers"]
        (command,) = self.container["args"]
        program, self.arguments = command[:20], shlex.split(command[20:])
        assert program == "exec python main.py "  # exec, so that SIGTERM reaches Python
        self.parsed = train._parser("main.py").parse_intermixed_args(
            [word.replace("$JOB_COMPLETION_INDEX", "0") for word in self.arguments]
        )

    @property
    def config(self) -> Config:
        more = [f"mesh.processes={self.parsed.processes}"] if self.parsed.processes else []
        return load(str(ROOT / self.parsed.cfg), [*self.parsed.overrides, *more])


@every_file
def test_a_jobset_has_what_the_schema_requires_and_nothing_unknown(file):
    found = yaml.safe_load(file.read_text())
    assert not faults(found)
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    names = [found["metadata"]["name"], found["spec"]["replicatedJobs"][0]["name"]]
    assert all(re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) for name in names)


@every_file
def test_all_hosts_start_again_together_unless_the_input_is_bad(file):
    run = Run(file)
    assert run.job["parallelism"] == run.job["completions"] and run.job["backoffLimit"] == 0
    (on_exit,) = run.job["podFailurePolicy"]["rules"]
    assert on_exit["action"] == "FailJob" and on_exit["onExitCodes"]["values"] == [2]
    assert on_exit["onExitCodes"]["containerName"] == run.container["name"]
    assert run.pod["restartPolicy"] == "Never"  # which podFailurePolicy needs
    assert run.set["spec"]["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    assert "checkpoint.resume=if_present" in run.arguments
    assert run.container["resources"]["requests"] == run.container["resources"]["limits"]


def test_the_tpu_run_has_the_mesh_of_its_slice_and_its_data_in_a_bucket():
    run = Run(HERE / "tpu.yaml")
    hosts, chips = run.job["parallelism"], run.container["resources"]["limits"]["google.com/tpu"]
    sides = run.pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    slices = find_slices(f"v5litepod-{hosts * chips}")
    assert math.prod(map(int, sides)) == slices.devices and slices.hosts == hosts
    check_mesh(run.config.mesh, slices)
    check_places(run.config, slices)


def test_the_gpu_run_has_a_process_for_each_node_and_finds_the_first():
    run = Run(HERE / "gpu.yaml")
    nodes, gpus, config = run.job["parallelism"], run.container["resources"]["limits"]["nvidia.com/gpu"], run.config
    assert (config.mesh.processes, config.mesh.dp * config.mesh.mp) == (nodes, nodes * gpus)
    assert run.arguments[run.arguments.index("--process-id") + 1] == "$JOB_COMPLETION_INDEX"
    validate_process_arguments(run.parsed.coordinator, nodes - 1, config.mesh.processes)
    name = run.set["metadata"]["name"]
    assert run.parsed.coordinator.split(":")[0] == f"{name}-{run.replicated['name']}-0-0.{name}"
    assert config.data.dir.startswith("gs://") and config.checkpoint.dir.startswith("gs://")
    (mount,) = run.container["volumeMounts"]
    assert [volume["name"] for volume in run.pod["volumes"]] == [mount["name"]]


def test_the_image_copies_files_that_exist_and_installs_extras_that_exist():
    text = (HERE / "Dockerfile").read_text()
    copied = [word for line in re.findall("^COPY (.*) .*$", text, re.MULTILINE) for word in line.split()]
    assert {"main.py", "shmap_tp", "conf", "pyproject.toml"} <= {*copied}
    assert all((ROOT / one).exists() for one in copied)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"tpu", "cuda", "gcs"} <= extras.keys() and '".[${ACCELERATOR},gcs]"' in text
