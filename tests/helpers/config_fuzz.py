"""Random damage to configuration files, overrides and saved configurations: only ShmapTpError may be raised.

PYTHONPATH=. python tests/helpers/config_fuzz.py 20000        many more cases than the tests run
"""

import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from shmap_tp.config.compose import CONF, load, to_yaml
from shmap_tp.config.values import RULES, SECTIONS
from shmap_tp.config.yaml_files import saved_value
from shmap_tp.errors import ShmapTpError, printable

BASE = (CONF / "base.yaml").read_text()
KEYS = [*RULES]
FRAGMENTS = [
    "", " ", "\n", "\t", "\x00", "\r\n", "\u2028", "ü", "٣", "日本", "\\", "'", '"', "#", "%", "@", "`", "!", "&a ",
    "*a", "<<: ", "- ", ": ", "? ", "|\n", ">\n", "---\n", "...\n", "[", "]", "{", "}", "[[]]", "{a: b}",
    "{a: {b: c}}", "[a, b]", "[1, 2]", "[null]", "null", "~", "true", "yes", "nan", ".nan", ".inf", "-.inf", "1e400",
    "1e-400", "-1", "0", "1", "2", "3", "4", "0x1f", "0o7", "1_0", "1:30", "9" * 30, "9" * 5000, "1.5", "2001-01-01",
    "???", "${a}", "${run.dir}", "${oc.env:HOME}", "${oc.env:NOPE}", "${", "${}", "${run}", "${oc.decode:'[1'}",
    "${now:%Y}", "${hydra:x}", "!!python/object:os.system ls", "!!int x", "!!binary x", "!x y", "defaults: [a]\n",
    "- model: test\n", "- data: null\n", "- /model@x: test\n", "hydra: {}\n", "# @package a\n", "run: 5\n",
    "model: []\n", "a" * 300, "../x", "/etc", "foo://bar", "gs://b/c", "auto", "bytes", "test", "stdlib", "web",
    "all_reduce", "must", "(", ")", ",", "=", "range(1,3)", "choice(a,b)", "glob(*)", "int(x)", "\udcff", "\ufeff",
    "\x85", "\x1b[0m",
]  # fmt: skip


def damaged(text: str, random_: random.Random) -> str:
    """`text` with one or two parts replaced, removed, doubled, moved or overwritten with something odd."""
    for _ in range(random_.randint(1, 2)):
        begin = random_.randrange(len(text) + 1)
        end = min(len(text), begin + random_.choice([0, 0, 1, 3, 10, 100]))
        lines = text.splitlines(keepends=True) or [""]
        row = random_.randrange(len(lines))
        match random_.randrange(6):
            case 0:
                text = text[:begin] + random_.choice(FRAGMENTS) + text[end:]
            case 1:
                text = text[:begin] + text[end:]
            case 2:  # the value of a line
                key, colon, _ = lines[row].partition(": ")
                lines[row] = f"{key}{colon}{random_.choice(FRAGMENTS)}\n"
                text = "".join(lines)
            case 3:
                text = "".join([*lines[:row], lines[row], *lines[row:]])
            case 4:
                text = "".join([*lines[:row], random_.choice(FRAGMENTS) + "\n", *lines[row:]])
            case 5:
                random_.shuffle(lines)
                text = "".join(lines)
    return text


def odd_override(random_: random.Random) -> str:
    key = random_.choice([*KEYS, *SECTIONS, "a", "model", "data", "hydra.x", "defaults"])
    value = "".join(random_.choices(FRAGMENTS, k=random_.choice([1, 1, 1, 2, 3])))
    return f"{key}={value}" if random_.random() < 0.8 else damaged(f"{key}={value}", random_)


def outcome(seed: int, directory: Path) -> str:
    """What case `seed` leads to: "loaded", or the message.  Other errors than ShmapTpError are raised."""
    random_ = random.Random(seed)
    kind = random_.choice(["file", "overrides", "saved", "both"])
    file, overrides = directory / "config.yaml", []
    if kind in ("file", "both"):
        file.write_text(damaged(BASE, random_), encoding="utf-8", errors="surrogateescape")
    elif kind == "overrides":
        file.write_text(BASE)
    else:
        file.write_text(to_yaml(load(CONF / "base.yaml", [])))
        content = damaged(file.read_text(), random_).encode(errors="surrogateescape")
        file.write_bytes(content if random_.random() < 0.8 else bytes(b ^ 1 << random_.randrange(8) for b in content))
        saved_value(file, "checkpoint.dir")
    if kind in ("overrides", "both"):
        overrides = [odd_override(random_) for _ in range(random_.randint(1, 2))]
    try:
        config = load(file, overrides)
    except ShmapTpError as error:
        message = str(error)
        assert 1 <= len(message.splitlines()) <= 2 and len(printable(message)) < 2100, message
        return message
    (directory / "again.yaml").write_text(to_yaml(config))  # what is accepted can be saved
    return "loaded"


def main(count: int) -> None:
    failures = loaded = 0
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(count):
            begin = time.perf_counter()
            try:
                loaded += outcome(seed, Path(directory)) == "loaded"
            except Exception:  # reported with its seed; the exit code is then 1
                failures += 1
                print(f"seed {seed}\n{traceback.format_exc()[-1500:]}", flush=True)
            if (seconds := time.perf_counter() - begin) > 10:
                print(f"seed {seed} took {seconds:.0f} s", flush=True)
    print(f"{count} cases, {loaded} loaded, {failures} failed")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
