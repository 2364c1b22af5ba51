"""All equations of a traced program, those of its loops and nested programs included, and how often each runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.extend import core

LOOPS_OF_UNKNOWN_LENGTH = ("while", "cond")
"""Primitives whose bodies run an unknown number of times."""


@dataclass(frozen=True)
class Visit:
    """An equation, and where it stands."""

    equation: Any
    outer: str
    """The scope of the equation that contains it."""
    scans: int
    """How many scans it is nested in."""
    times: int
    """How often it runs, within `loop`."""
    loop: str | None
    """The primitive of a while loop or a branch around it, which runs an unknown number of times."""

    @property
    def scope(self) -> str:
        """The named scopes around it, outermost first, separated by slashes."""
        return f"{self.outer}/{self.equation.source_info.name_stack}".strip("/")

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
    return _equations(jaxpr, outer="", scans=0, times=1, loop=None)


def _equations(jaxpr: Any, outer: str, scans: int, times: int, loop: str | None) -> Iterator[Visit]:
    for equation in jaxpr.eqns:
        visit = Visit(equation, outer, scans, times, loop)
        yield visit
        if not (contained := bodies(equation.params)):
            continue
        inside = scans, times, loop
        if visit.name == "scan":
            inside = scans + 1, times * equation.params["length"], loop
        elif visit.name in LOOPS_OF_UNKNOWN_LENGTH:
            inside = scans, times, visit.name
        for body in contained:
            yield from _equations(body, visit.scope, *inside)


def bodies(params: dict[str, Any]) -> list[core.Jaxpr]:
    """The jaxprs among the parameters of an equation."""
    found = []
    for param in params.values():
        for x in param if isinstance(param, (tuple, list)) else (param,):
            if isinstance(x, core.ClosedJaxpr):
                found.append(x.jaxpr)
            elif isinstance(x, core.Jaxpr):
                found.append(x)
    return found
