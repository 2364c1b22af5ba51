"""pod.sh train: slices are created and main.py is started, repeatedly, until it is done."""

import re

import pytest

from tests.helpers.gcloud_stand_in import HOST, Cloud

ONCE = ["prepare", "start", "status"]
GONE = [("on_host.sh status", "", "ssh: connect: timed out\n", 255)]


def train(
    cloud: Cloud, hosts: list[str], states: str, code: int = 0, more: list[tuple] = (), options: tuple[str, ...] = ()
) -> tuple[list, str]:
    """(its commands but `describe`, its output); `hosts` are the answers to `status`, `states` those of `describe`."""
    cloud.answer(
        *more,
        *[("on_host.sh status", answer, "", 0) for answer in hosts],
        *[("value(state)", "", "", 1) if state == "-" else ("value(state)", f"{state}\n", "", 0)
          for state in states.split()],
    )  # fmt: skip
    given = ["--type", "v4-8", "--spot", "--unchecked", "--poll", "0", "--repository", "https://h/r.git", *options]
    done = cloud.pod("train", "p", *given, "--", "checkpoint.dir=gs://b/c", code=code)
    words = []
    for verb, what, _, *rest in cloud.calls():
        host = [one.rpartition(HOST)[2].split()[0].rstrip(";") for one in rest if HOST in one]
        words += [] if what == "describe" else host or [what]
        assert "start" not in host or any("checkpoint.resume=if_present" in one for one in rest)
        assert verb == "tpu-vm"
    return words, done.stdout + done.stderr


def test_train_checks_the_run_before_it_rents(cloud):
    """Data, mesh, buckets: tests/test_check_slices.py.  That the other steps check it: test_pod_setup.py."""
    given = ["--type", "v5litepod-16", "--", "--cfg", "conf/recipes/gpt2_124m_v5e-8.yaml", "checkpoint.dir=gs://b/c"]
    refused = cloud.pod("train", "p", *given, code=2)
    assert "mesh dp=8 x mp=1 is 8 devices, but v5litepod-16 has 16" in refused.stderr
    assert cloud.calls() == [] and not refused.stdout


def test_train_creates_missing_slices_and_ends_when_main_py_is_done(cloud):
    calls, output = train(cloud, ["running 5\n", "ended 0\n"], "- CREATING READY")
    assert calls == ["create", *ONCE, "status"] and "p: main.py is done; give the slices back" in output


def test_train_resumes_after_a_stop_and_replaces_preempted_slices(cloud):
    hosts = ["running 5\nrunning 6\n", "ended 75\nended 75\n", "running 7\nrunning 8\n", "ended 0\nended 0\n"]
    calls, output = train(cloud, hosts, "READY PREEMPTED - READY")
    assert calls == [*ONCE, "status", "delete", "create", *ONCE, "status"]
    assert "stopped and saved, or preempted: resuming" in output


def test_train_with_any_takes_the_first_type_that_is_given_and_starts_as_many_processes_as_it_has_hosts(cloud):
    no_capacity = ("type=v5litepod-16", "", "there is no more capacity\n", 1)
    states = ["", "READY\n", "PREEMPTED\n", "", "READY\n"]
    cloud.answer(
        ("type=v5litepod-16", "", "", 0), no_capacity,
        *[("value(state)", state, "", 0) for state in states],
        *[("networkEndpoints.len()", f"{hosts}\n", "", 0) for hosts in (4, 1)],
        *[("on_host.sh status", answer, "", 0) for answer in ("ended 75\n" * 4, "ended 0\n")],
    )  # fmt: skip
    given = ["--any", "v5litepod-16 v5litepod-8", "--unchecked", "--poll", "0", "--repository", "https://h/r.git"]
    done = cloud.pod("train", "p", *given, "--", "mesh.dp=auto", "checkpoint.dir=gs://b/c")
    words = [" ".join(call) for call in cloud.calls()]
    found = [given[0] for each in words if (given := re.search(r"(accelerator-type|mesh.processes)=\S+", each))]
    asked = ["accelerator-type=v5litepod-16", "mesh.processes=4", "accelerator-type=v5litepod-16"]
    assert found == [*asked, "accelerator-type=v5litepod-8", "mesh.processes=1"]
    assert "p: asking for v5litepod-8" in done.stdout and "main.py is done" in done.stdout


def test_a_type_that_is_not_given_within_the_patience_is_given_up_for_the_next(cloud):
    states = ["", "WAITING_FOR_RESOURCES\n", "", "ACTIVE\n"]
    cloud.answer(
        *[("value(state.state)", state, "", 0) for state in states],
        ("networkEndpoints.len()", "1\n", "", 0), ("on_host.sh status", "ended 0\n", "", 0),
    )  # fmt: skip
    given = ["--any", "v6e-16 v5litepod-8", "--queued", "--patience", "0", "--unchecked", "--poll", "0"]
    done = cloud.pod("train", "p", *given, "--repository", "https://h/r.git", "--", "checkpoint.dir=gs://b/c")
    made = [call for call in cloud.calls() if call[0] == "queued-resources" and call[1] != "describe"]
    assert [call[1] for call in made] == ["create", "delete", "create"]
    for call, kind, version in (made[0], "v6e-16", "v2-alpha-tpuv6e"), (made[2], "v5litepod-8", "v2-alpha-tpuv5-lite"):
        assert f"--accelerator-type={kind}" in call and f"--runtime-version={version}" in call
    assert "p: not given within 0 s: asking for the next type" in done.stdout


def test_train_detects_preempted_slices_when_no_host_answers(cloud):
    calls, output = train(cloud, ["ended 0\n"], "READY PREEMPTED PREEMPTED - READY", more=GONE)
    assert calls == [*ONCE, "delete", "create", *ONCE] and "preempted" in output


@pytest.mark.parametrize(
    ("hosts", "code", "options", "then", "words"),
    [
        # one host refuses its input; the others, which wait for it, are stopped
        (["running 5\nended 2\n", "ended 137\nended 2\n"], 2, (), ["stop", "status"], "main.py refused its input"),
        # the hosts end within seconds of each other, and a host that is about to end with 0 is not stopped
        ([*["ended 0\nrunning 6\n"] * 2, "ended 0\nended 0\n"], 0, (), ["status", "status"], "main.py is done"),
        # one that does not is stopped
        (["ended 0\nrunning 6\n", "ended 0\nended 137\n", "ended 0\n"], 0, ("--seconds", "0"),
         ["stop", "status", *ONCE], "failure 1 of 5"),
        (["ended 1\n"], 1, (), ONCE * 4,
         "failure 5 of 5 (above, and pod.sh logs p)\nerror: 5 failures in a row; giving up\n"),
    ],
    ids=["refused", "nearly done", "one is not done", "failures"],
)  # fmt: skip
def test_train_ends_goes_on_or_gives_up_by_how_main_py_ended_on_the_hosts(cloud, hosts, code, options, then, words):
    calls, output = train(cloud, hosts, "READY", code, options=options)
    assert calls == [*ONCE, *then] and words in output and ("failure" in output) == ("failure" in words)
