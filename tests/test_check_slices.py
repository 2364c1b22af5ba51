"""`--check --type`: what would keep a run from training on new TPU slices is found before they are rented."""

import pytest
from fsspec.registry import _registry

from shmap_tp import train
from shmap_tp.errors import UserError
from shmap_tp.hardware.devices import find_slices
from tests.helpers.buckets import Bucket, write_data_set

# type: (devices, hosts), from the pages of each version on cloud.google.com/tpu/docs
TYPES = {
    "v2-8": (8, 1), "v3-32": (32, 4), "v4-8": (4, 1), "v4-32": (16, 4), "v5litepod-1": (1, 1), "v5litepod-8": (8, 1),
    "v5litepod-16": (16, 4), "v5p-8": (4, 1), "v6e-8": (8, 1), "v6e-256": (256, 64), "2xv5litepod-256": (512, 128),
}  # fmt: skip


def test_the_devices_and_hosts_of_a_type_are_those_of_its_page():
    assert {name: (find_slices(name).devices, find_slices(name).hosts) for name in TYPES} == TYPES


NONE = ["", "v3", "v3-0", "v3-33", "v4-12", "v9-8", "h100-8", "v5litepod-18", "0xv4-8", "2xv3-32"]


@pytest.mark.parametrize("name", NONE)
def test_a_type_that_does_not_exist_is_refused(name):
    with pytest.raises(UserError, match=r"use |see https"):
        find_slices(name)


RECIPE = ["--cfg", "conf/recipes/6_9b_v3-32.yaml"]
DATA = ["data.dir=gs://bucket/neox", "data.cache=null"]
SAVED = ["checkpoint.dir=gs://bucket/run"]


def sources(**weights: str) -> list[str]:
    """Sources of gs://bucket, with their weights."""
    each = (f"{name}:{{dir:gs://bucket/{name},weight:{weight}}}" for name, weight in weights.items())
    return ["data.dir=null", "data.source=null", "data.cache=null", f"data.sources={{{','.join(each)}}}"]


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Calls `main.py --check` with other arguments, where gs://bucket has the data of 100B tokens; returns its exit
    code, what it printed, and its error."""
    monkeypatch.setitem(_registry, "gs", Bucket)
    monkeypatch.setenv("BUCKETS", str(tmp_path))
    write_data_set(tmp_path / "bucket/neox", vocabulary=50277, train=99_000_000_000, tokenizer="neox")
    write_data_set(tmp_path / "bucket/web", vocabulary=50277, train=10**9, tokenizer="neox")
    write_data_set(tmp_path / "bucket/bytes", vocabulary=256, train=10**9, tokenizer="bytes")
    write_data_set(tmp_path / "bucket/llama3", vocabulary=128256, train=10**9)
    write_data_set(tmp_path / "bucket/mixed", vocabulary=50277, train=10**9)
    (tmp_path / "bucket/mixed/tokenizer.json").write_text("another")
    write_data_set(tmp_path / "bucket/alone", vocabulary=50277, train=10**9, tokenizer="neox")
    (tmp_path / "bucket/alone/tokenizer.json").unlink()
    (tmp_path / "bucket/saved/50").mkdir(parents=True)

    def call(*arguments: str) -> tuple[int, str, str]:
        return train.main(["--check", *arguments]), *capsys.readouterr()

    return call


V3 = ["--type", "v3-32"]
BYTES = "has a vocabulary of 256, tokenizer bytes, but model.vocabulary=50304"
ACCEPTED = {
    "the recipe": (
        [*RECIPE, *DATA, *SAVED, *V3],
        "gs://bucket/neox: 99,000,000,000 tokens, tokenizer neox, vocabulary 50277",
        "The run can start on v3-32: 32 devices, hosts: 4.",
    ),
    "each source": (
        [*RECIPE, *sources(neox="0.7", web="0.3"), *SAVED, *V3],
        "source neox     gs://bucket/neox: 70 %; 99,000,000,000 tokens, tokenizer neox",
        "source web      gs://bucket/web: 30 %; 1,000,000,000 tokens, tokenizer neox",
    ),
    "data parallelism of what there is": (
        [*RECIPE, *DATA, *SAVED, "mesh.dp=auto", "mesh.processes=8", "--type", "v4-64"], "dp=16 x mp=2 = 32 devices"
    ),
    "a large model on the bytes of the Python library": (
        ["model=6_9b", "data=stdlib", "mesh.dp=2", "mesh.mp=4", "--type", "v2-8"], f"warning: data/stdlib {BYTES}"
    ),
    "data of another tokenizer": (
        [*RECIPE, *SAVED, "data.dir=gs://bucket/bytes", *V3], f"warning: gs://bucket/bytes {BYTES}"
    ),
    "data without its tokenizer": (
        [*RECIPE, *SAVED, "data.dir=gs://bucket/alone", "data.cache=null", *V3],
        "warning: gs://bucket/alone has no tokenizer.json of its data: no samples",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_run_that_would_train_is_accepted_with_what_it_reads_and_with_warnings(check, case):
    given, *expected = ACCEPTED[case]
    code, printed, error = check(*given)
    assert (code, error) == (0, "") and all(line in printed for line in expected), printed
    assert ("warning" in printed) == any("warning" in line for line in expected), printed


REFUSED = {
    "no data": (
        [*SAVED, *V3],
        "use data.dir=gs://bucket/fineweb_edu_neox, after\n  python -m shmap_tp.prepare --dataset",
    ),
    "an empty bucket": (
        [*SAVED, "data.dir=gs://bucket/none", *V3],
        "gs://bucket/none/train.bin does not exist; prepare it and copy it there:\n  python -m shmap_tp.prepare",
    ),
    "data that the disk cannot hold": ([*SAVED, DATA[0], *V3], "use data.cache=null"),
    "tokens that the model does not have": (
        [*SAVED, "data.dir=gs://bucket/llama3", *V3],
        "but model.vocabulary=50304; use data of this vocabulary",
    ),
    "another tokenizer.json": ([*SAVED, "data.dir=gs://bucket/mixed", *V3], "it is not the tokenizer of this data"),
    "sources that cannot be mixed": (
        [*SAVED, *sources(bytes="0.5", neox="0.5"), *V3],
        "data.sources.neox has tokenizer neox, and data.sources.bytes has bytes; prepare both with the same tokenizer",
    ),
    "a source on the disks of the hosts": (
        [*SAVED, "data.dir=null", "data.source=null", "data.sources={a:{dir:data/a,weight:1}}", *V3],
        "use data.sources.a.dir=gs://bucket/a, after\n  python -m shmap_tp.prepare",
    ),
    "no bucket": (
        [*DATA, "checkpoint.dir=gs://BUCKET/run", *V3],
        "there is no gs://BUCKET; create it in the region of the slices:\n  gcloud storage buckets create gs://BUCKET",
    ),
    "checkpoints on the hosts": ([*DATA, *V3], "use checkpoint.dir=gs://BUCKET/6_9b"),
    "checkpoints of an earlier run": ([*DATA, "checkpoint.dir=gs://bucket/saved", *V3], "continue with --resume"),
    "nothing to resume": ([*DATA, *SAVED, "--resume", *V3], "no checkpoint in gs://bucket/run; leave it out"),
    "another slice": (
        [*DATA, *SAVED, "--type", "v5litepod-16"],
        "mesh dp=16 x mp=2 is 32 devices, but v5litepod-16 has 16; choose another --type, or mesh.dp and mesh.mp",
    ),
    "another number of hosts": ([*DATA, *SAVED, "--type", "v5litepod-32"], "use mesh.processes=8"),
    "another number of slices": ([*DATA, *SAVED, "--type", "2xv5litepod-16"], "use mesh.slices=2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_would_not_train_is_refused_in_at_most_two_lines(check, case):
    given, message = REFUSED[case]
    code, printed, error = check(*RECIPE, *given)
    assert (code, printed) == (2, "") and message in error and len(error.splitlines()) <= 2, error


def test_a_type_is_only_for_a_check(capsys):
    assert train.main(["--type", "v3-32"]) == 2
    assert "--type v3-32 is for --check" in capsys.readouterr().err
