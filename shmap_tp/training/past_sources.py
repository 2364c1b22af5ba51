"""Whether a run that is resumed has the sources that it read, with the shares that they had, in the steps it has done.

Later steps may read other sources, with other shares.  A source is known by its files, so its name may change, and
data.dir may become one of several sources.
"""

from itertools import zip_longest
from typing import Any

from shmap_tp.data.metadata import SPLITS
from shmap_tp.errors import UserError


def refuse_another_past(saved: dict[str, Any], identity: dict[str, Any], step: int, checkpoint: str) -> None:
    """Raise UserError if the identities `saved` in the checkpoint of `step` and of this run differ in what the steps
    before `step` read."""
    for was, now in zip_longest(_phases(saved, step), _phases(identity, step), fillvalue=(None, None, "as before")):
        if was[:2] != now[:2]:
            raise UserError(
                f"{checkpoint} is of another run, which read {was[2]}, and this one {now[2]};\nwhat was read cannot "
                f"change. Let changes begin at step {step}: from_step: {step}, or weight: {{0: 0.7, {step}: 0.5}} with "
                f"the weight of then"
            )


def _phases(identity: dict[str, Any], step: int) -> list[tuple[int, dict[tuple[str | None, ...], str], str]]:
    """(first step, share by the sha256 of the files, both in words) of each phase that begins before `step`."""
    only = {"data.dir": {split: identity[split] for split in SPLITS if split in identity}}
    sources, phases = identity.get("sources", only), identity.get("phases", {"0": {"data.dir": "1"}})
    found = []
    for first, shares in phases.items():
        if not first.isdecimal() or int(first) >= step:
            continue
        files = {
            name: tuple(each[split].get(key) for key in ("sha256", "counted") for split in SPLITS)
            for name, each in sources.items()
        }
        texts = [f"{share} {name} (sha256 {files[name][0][:12]})" for name, share in shares.items() if name in files]
        share_of = {files.get(name, (name,)): share for name, share in shares.items()}
        found.append((int(first), share_of, f"from step {first} {' + '.join(texts)}"))
    return sorted(found, key=lambda phase: phase[0])
