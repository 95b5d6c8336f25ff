"""Medians with a spread, for few and noisy repeats."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Median, 20th and 80th percentile (linear between the sorted values)."""

    median: float
    p20: float
    p80: float

    def record(self) -> dict[str, float]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.p20)} to {_short(self.p80)})"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: Sequence[float]) -> Spread:
    """Summary of one number over the repeats.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("no repeat to summarise")
    low, middle, high = np.quantile(np.asarray(values, dtype=float), (0.2, 0.5, 0.8))
    return Spread(float(middle), float(low), float(high))


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's r; None for fewer than three points or a constant."""
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])
