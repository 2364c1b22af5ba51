"""All equations of a traced program, those of its loops and nested programs included, and how often each runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

LOOPS_OF_UNKNOWN_LENGTH = ("while", "cond")
"""Primitives whose bodies run an unknown number of times."""


@dataclass(frozen=True)
class Visit:
    """An equation, and where it stands."""

    equation: Any
    scope: str
    """The named scopes around it, outermost first, separated by slashes."""
    scans: int
    """How many scans it is nested in."""
    times: int
    """How often it runs, within `loop`."""
    loop: str | None
    """The primitive of a while loop or a branch around it, which runs an unknown number of times."""

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.equation.primitive.name

    @property
    def is_recomputed(self) -> bool:
        """Whether the backward pass recomputes it.  JAX marks such equations in their name stack."""
        return "rematted_computation" in self.scope

    @property
    def is_backward(self) -> bool:
        """Whether it belongs to the backward pass, and is not a recomputation."""
        return "transpose(" in self.scope and not self.is_recomputed


def equations(jaxpr: Any) -> Iterator[Visit]:
    """Every equation of `jaxpr` and of the jaxprs inside it; one that contains others comes before them."""
    return _equations(jaxpr, scope="", scans=0, times=1, loop=None)


def _equations(jaxpr: Any, scope: str, scans: int, times: int, loop: str | None) -> Iterator[Visit]:
    for equation in jaxpr.eqns:
        here = f"{scope}/{equation.source_info.name_stack}".strip("/")
        visit = Visit(equation, here, scans, times, loop)
        yield visit
        inside = scans, times, loop
        if visit.name == "scan":
            inside = scans + 1, times * equation.params["length"], loop
        elif visit.name in LOOPS_OF_UNKNOWN_LENGTH:
            inside = scans, times, visit.name
        for body in bodies(equation.params):
            yield from _equations(body, here, *inside)


def bodies(params: dict[str, Any]) -> list[core.Jaxpr]:
    """The jaxprs among the parameters of an equation."""
    kinds = (core.Jaxpr, core.ClosedJaxpr)
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, kinds))
    return [x.jaxpr if isinstance(x, core.ClosedJaxpr) else x for x in leaves if isinstance(x, kinds)]
