"""pod.sh train: slices are created and main.py is started, repeatedly, until it is done."""

from tests.helpers.gcloud_stand_in import HOST, Cloud


def train(
    cloud: Cloud, *, hosts: list[str], states: list[str], code: int, more: list[tuple] = (), options: list[str] = ()
) -> tuple[str, list]:
    """(its output, its commands but `describe` and `scp`); `hosts` are the answers to `status`."""
    cloud.answer(
        *more,
        *[("on_host.sh status", answer, "", 0) for answer in hosts],
        *[("value(state)", f"{state}\n" if state else "", "", 0 if state else 1) for state in states],
    )
    given = ["--type", "v4-8", "--spot", "--unchecked", "--poll", "0", *options, "--", "checkpoint.dir=gs://b/c"]
    done = cloud.pod("train", "p", *given, code=code)
    words = []
    for verb, what, _, *rest in cloud.calls():
        host = [one.rpartition(HOST)[2].split()[0].rstrip(";") for one in rest if HOST in one]
        words += [] if what in ("describe", "scp") else host or [what]
        assert "start" not in host or any("checkpoint.resume=if_present" in one for one in rest)
        assert verb == "tpu-vm"
    return done.stdout + done.stderr, words


def test_train_checks_the_run_before_it_rents(cloud):
    """Data, mesh, buckets: tests/training/test_check_slices.py."""
    given = ["--type", "v5litepod-16", "--", "--cfg", "conf/recipes/gpt2_124m_v5e-8.yaml", "checkpoint.dir=gs://b/c"]
    for step in ("train", "create"):
        refused = cloud.pod(step, "p", *given, code=2)
        assert "mesh dp=8 x mp=1 is 8 devices, but v5litepod-16 has 16" in refused.stderr
        assert cloud.calls() == [] and not refused.stdout


ONCE = ["prepare", "start", "status"]


def test_train_creates_missing_slices_and_ends_when_main_py_is_done(cloud):
    output, calls = train(cloud, hosts=["running 5\n", "ended 0\n"], states=["", "CREATING", "READY"], code=0)
    assert calls == ["create", *ONCE, "status"] and "p: main.py is done; give the slices back" in output


def test_train_resumes_after_a_stop_and_replaces_preempted_slices(cloud):
    output, calls = train(
        cloud,
        hosts=["running 5\nrunning 6\n", "ended 75\nended 75\n", "running 7\nrunning 8\n", "ended 0\nended 0\n"],
        states=["READY", "PREEMPTED", "", "READY"],
        code=0,
    )
    assert calls == [*ONCE, "status", "delete", "create", *ONCE, "status"]
    assert "stopped and saved, or preempted: resuming" in output


def test_train_detects_preempted_slices_when_no_host_answers(cloud):
    gone = [("on_host.sh status", "", "ssh: connect: timed out\n", 255)]
    output, calls = train(
        cloud, hosts=["ended 0\n"], states=["READY", "PREEMPTED", "PREEMPTED", "", "READY"], code=0, more=gone
    )
    assert calls == [*ONCE, "delete", "create", *ONCE] and "preempted" in output


def test_train_stops_when_main_py_refuses_its_input(cloud):
    """One host refuses; the others, which wait for it, are stopped."""
    output, calls = train(
        cloud,
        hosts=["running 5\nended 2\n", "ended 137\nended 2\n"],
        states=["READY"],
        code=2,
    )
    assert calls == [*ONCE, "stop", "status"] and "main.py refused its input" in output


def test_train_waits_for_the_other_hosts_when_one_is_done(cloud):
    """The hosts end within seconds of each other, and a host that is about to end with 0 is not stopped."""
    output, calls = train(
        cloud,
        hosts=["ended 0\nrunning 6\n", "ended 0\nrunning 6\n", "ended 0\nended 0\n"],
        states=["READY"],
        code=0,
    )
    assert calls == [*ONCE, "status", "status"] and "failure" not in output


def test_train_stops_a_host_that_does_not_end_after_the_others(cloud):
    output, calls = train(
        cloud,
        hosts=["ended 0\nrunning 6\n", "ended 0\nended 137\n", "ended 0\n"],
        states=["READY"],
        code=0,
        options=["--seconds", "0"],
    )
    assert calls == [*ONCE, "stop", "status", *ONCE] and "failure 1 of 5" in output


def test_train_gives_up_after_five_failures_in_a_row(cloud):
    output, calls = train(cloud, hosts=["ended 1\n"], states=["READY"], code=1)
    assert (
        calls == ONCE * 5 and "failure 4 of 5" in output and output.rstrip().endswith("5 failures in a row; giving up")
    )
