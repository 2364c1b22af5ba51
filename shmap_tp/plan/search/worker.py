"""A child process that compiles one candidate: a request as JSON on stdin, a row as JSON on the last line of stdout.

    {"config": ..., "version": "v5e", "devices": 16, "topology": "4x4"}  ->  the row, or {"error": "..."}

A crash of the compiler, or the end of a child that took too much memory, ends no other compilation.
"""

import json
import sys
from dataclasses import asdict

from shmap_tp.config.compose import from_values
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.plan.targets import Target, find_target, predict_on


def request(config: Config, target: Target) -> str:
    """What the child process reads."""
    place = {"version": target.version, "devices": target.devices, "topology": getattr(target, "topology", None)}
    return json.dumps(place | {"config": asdict(config)})


def answer(text: str) -> dict:
    """The row of a request, or its error."""
    given = json.loads(text)
    try:
        config = from_values(given["config"], "the configuration of a candidate")
        target = find_target(given["version"], given["devices"], given["topology"], config.mesh.slices)
        return predict_on(config, target).row.to_json()
    except UserError as error:
        return {"error": str(error).splitlines()[0]}


if __name__ == "__main__":
    print(json.dumps(answer(sys.stdin.read())))
