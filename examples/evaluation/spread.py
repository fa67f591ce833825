"""Mean and spread of measurements with several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """Mean, least and greatest of some values, and their number."""

    mean: float
    least: float
    greatest: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """
        Raises:
            ValueError: if there are no values.
        """
        values = list(values)
        if not values:
            raise ValueError("A spread needs at least one value.")
        return cls(sum(values) / len(values), min(values), max(values), len(values))

    def text(self, style: str = ".3f") -> str:
        """The mean, and with several values the least and the greatest in brackets."""
        mean, least, greatest = (format(value, style) for value in self[:3])
        return mean if self.count == 1 else f"{mean} ({least}–{greatest})"


def by(rows: Iterable[dict[str, Any]], *names: str) -> dict[tuple, list[dict[str, Any]]]:
    """The rows of the same cell, which differ in their seeds, by the values of some fields."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def two_errors(values: Iterable[float]) -> float:
    """Twice the standard error of the mean; 0 for less than two values."""
    values = list(values)
    return 2 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def bars_of(spreads: Iterable[Spread]) -> list[list[float]]:
    """Distances of the least and the greatest values from the means: the errors of matplotlib's bars."""
    spreads = list(spreads)
    return [[each.mean - each.least for each in spreads], [each.greatest - each.mean for each in spreads]]


def draw_spreads(axes: Any, points: dict[Any, Spread], **line: Any) -> None:
    """A line through the means, with a bar from the least value to the greatest where there are several."""
    means = [spread.mean for spread in points.values()]
    axes.plot(points.keys(), means, **line)
    several = {x: spread for x, spread in points.items() if spread.count > 1}
    if several:
        means = [spread.mean for spread in several.values()]
        style = {"fmt": "none", "ecolor": line["color"], "elinewidth": 1.0, "capsize": 2.5}
        axes.errorbar([*several], means, yerr=bars_of(several.values()), **style)
