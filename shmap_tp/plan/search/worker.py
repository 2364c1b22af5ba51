"""A child process that compiles one candidate: a request as JSON on stdin, a row as JSON on the last line of stdout.

    {"config": ..., "version": "v5e", "sides": [4, 4], "slices": 1}  ->  the row, or {"error": "..."}

A crash of the compiler, or the end of a child that took too much memory, ends no other compilation.
"""

import json
import sys
from dataclasses import asdict

from shmap_tp.config.compose import from_values
from shmap_tp.config.schema import Config
from shmap_tp.errors import UserError
from shmap_tp.plan.predict import predict
from shmap_tp.plan.topologies import Slice


def request(config: Config, target: Slice) -> str:
    """What the child process reads."""
    return json.dumps(
        {"config": asdict(config), "version": target.version, "sides": target.sides, "slices": target.slices}
    )


def answer(text: str) -> dict:
    """The row of a request, or its error."""
    given = json.loads(text)
    target = Slice(given["version"], tuple(given["sides"]), given["slices"])
    try:
        return predict(from_values(given["config"], "the configuration of a candidate"), target).row.to_json()
    except UserError as error:
        return {"error": str(error).splitlines()[0]}


if __name__ == "__main__":
    print(json.dumps(answer(sys.stdin.read())))
