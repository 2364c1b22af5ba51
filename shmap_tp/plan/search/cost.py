"""Time and cost of a whole run: tokens and prices as they are given, days and dollars as published runs took."""

import argparse
import re
from dataclasses import dataclass

from shmap_tp.errors import UserError
from shmap_tp.plan.report import CALIBRATIONS, Calibration
from shmap_tp.plan.targets import Machine

UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def token_count(text: str) -> float:
    """The number of `1e11`, `100B` or `1.5T`; for argparse."""
    found = re.fullmatch(r"([-+.\d_e]*?)([KMBT]?)", text, re.IGNORECASE)
    try:
        return float(found[1]) * UNITS[found[2].upper()]
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of tokens; give one such as 1e11, 100B or 1.5T"
        ) from None


def short_count(number: float) -> str:
    """1e11 -> '100B'."""
    unit, size = next(((unit, size) for unit, size in reversed(UNITS.items()) if number >= size), ("", 1))
    return f"{number / size:g}{unit}"


def parse_prices(text: str | None, versions: list[str]) -> dict[str, float]:
    """Dollars per chip hour by version: of `2.5` for all, of `v5e=1.2,v6e=2.7` by name.  Raises UserError."""
    if text is None:
        return {}
    try:
        words = [word.split("=", 1) for word in text.split(",")] if "=" in text else [(name, text) for name in versions]
        prices = {version: float(price) for version, price in words}
    except ValueError:
        raise UserError(f"--price {text} is no price; give dollars per chip hour: 1.2, or v5e=1.2,v6e=2.7") from None
    for version in versions:
        if not 0 <= prices.get(version, -1.0) < float("inf"):
            raise UserError(f"--price {text} has no price of 0 or more for {version}; add {version}=DOLLARS")
    for version in set(prices) - set(versions):
        raise UserError(f"--price {text}: {version} is not searched; omit it, or add it to --versions")
    return prices


@dataclass(frozen=True)
class Cost:
    """A token budget, what a chip costs for an hour, and how much longer than predicted published steps took."""

    tokens: float
    price: float | None
    chips: int
    kind: str
    """jax.Device.device_kind."""

    @classmethod
    def on(cls, machine: Machine, tokens: float, price: float | None) -> "Cost":
        return cls(tokens, price, machine.chips, machine.kind)

    @property
    def calibration(self) -> Calibration | None:
        return CALIBRATIONS.get(self.kind)

    @property
    def names(self) -> list[str]:
        return ["days", *(["dollars"] if self.price is not None else [])]

    @property
    def factors(self) -> list[float]:
        """What a predicted step is multiplied by: as expected, at least, at most."""
        found = self.calibration
        return [found.constant, found.lowest, found.highest] if found else [1.0]

    def figures(self, tokens_per_second: float) -> list[list[float]]:
        """By name, at this speed, which is a predicted one: as expected, at least, at most."""
        days = [factor * self.tokens / tokens_per_second / 86400 for factor in self.factors]
        dollars = [[24 * self.chips * self.price * each for each in days]] if self.price is not None else []
        return [days, *dollars]

    def cells(self, tokens_per_second: float) -> list[str]:
        """As expected, by name."""
        return [self._format(name, values[0]) for name, values in self._by_name(tokens_per_second)]

    def text(self, tokens_per_second: float) -> str:
        """As expected, and the range of published runs."""
        words = []
        for name, values in self._by_name(tokens_per_second):
            value, *ends = (self._format(name, each) for each in values)
            words.append(f"{value} {name}{_range(ends)}")
        return f"{', '.join(words)}, {self.basis}"

    @property
    def basis(self) -> str:
        """What the predicted step is multiplied by."""
        if self.calibration is None:
            return "by the step as planned, not calibrated"
        constant, *ends = (f"{factor:.2f}" for factor in self.factors)
        return f"at {constant}{_range(ends)} times the step"

    @property
    def legend(self) -> str:
        return f"{' and '.join(self.names)}: {self.basis}{', as published runs took' if self.calibration else ''}"

    def _by_name(self, tokens_per_second: float) -> list[tuple[str, list[float]]]:
        return list(zip(self.names, self.figures(tokens_per_second), strict=True))

    def _format(self, name: str, value: float) -> str:
        return f"{value:,.1f}" if name == "days" else f"{value:,.0f}"


def _range(ends: list[str]) -> str:
    """The lowest and the highest, in brackets, where they differ."""
    return f" ({ends[0]} to {ends[1]})" if len(set(ends)) == 2 else ""
