"""Intervals and slopes, with prompts as the units that are resampled.

Positions of one response are alike, so treating them as independent would give intervals that
are far too narrow. Everything here works on sums a prompt: a bootstrap sample is a weight a
prompt, and a mean or a slope is a ratio of weighted sums.

Shape suffixes: C clusters (prompts), S bootstrap samples, R rows, G depths.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
COVERAGE = (2.5, 97.5)


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """A least-squares line `y = intercept + slope x` with the slope's 95 % interval and R²."""

    slope: float
    intercept: float
    slope_low: float
    slope_high: float
    r2: float
    level: str


def bootstrap_weights(clusters: int, repeats: int, seed: int) -> Array:
    """[S, C] how often each cluster is drawn when C are drawn with replacement."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(clusters, np.full(clusters, 1 / clusters), size=repeats)


def cluster_sums(values_R: Array, cluster_R: Array, clusters: int) -> Array:
    """[C] sums of the values a cluster."""
    return np.bincount(cluster_R, weights=values_R, minlength=clusters)


def mean_interval(values_R: Array, cluster_R: Array, weights_SC: Array) -> Interval:
    """Mean over rows, resampling clusters; NaN when there is no row.

    >>> weights = bootstrap_weights(2, 100, seed=0)
    >>> mean_interval(np.array([1.0, 1.0]), np.array([0, 1]), weights)
    Interval(mean=1.0, low=1.0, high=1.0)
    """
    if not len(values_R):
        return Interval(float("nan"), float("nan"), float("nan"))
    clusters = weights_SC.shape[1]
    sum_C = cluster_sums(values_R, cluster_R, clusters)
    count_C = np.bincount(cluster_R, minlength=clusters)
    counts_S = weights_SC @ count_C
    means_S = (weights_SC @ sum_C)[counts_S > 0] / counts_S[counts_S > 0]
    low, high = np.percentile(means_S, COVERAGE)
    return Interval(float(np.mean(values_R)), float(low), float(high))


def fit_line(x_R: Array, y_R: Array, cluster_R: Array, weights_SC: Array, level: str) -> Line:
    """Least squares of y on x; NaN where x does not vary.

    Args:
        x_R: regressor.
        y_R: response.
        cluster_R: cluster of each row.
        weights_SC: bootstrap weights.
        level: what a row is ("position", "prompt"): a slope's sign depends on it.
    """
    clusters = weights_SC.shape[1]
    ones_R = np.ones_like(x_R)
    parts = (ones_R, x_R, y_R, x_R * x_R, x_R * y_R, y_R * y_R)
    sums_6C = np.stack([cluster_sums(part, cluster_R, clusters) for part in parts])
    slope, intercept, r2 = (float(v) for v in _solve(sums_6C.sum(axis=1)))
    slopes_S = _solve(sums_6C @ weights_SC.T)[0]
    slopes_S = slopes_S[np.isfinite(slopes_S)]
    low, high = np.percentile(slopes_S, COVERAGE) if len(slopes_S) else (np.nan, np.nan)
    return Line(slope, intercept, float(low), float(high), r2, level)


def _solve(sums: Array) -> tuple[Array, Array, Array]:
    """Slope, intercept, R² from (n, x, y, xx, xy, yy) sums."""
    n, x, y, xx, xy, yy = sums
    with np.errstate(divide="ignore", invalid="ignore"):
        var_x, var_y, cov = xx / n - (x / n) ** 2, yy / n - (y / n) ** 2, xy / n - x * y / n**2
        # Rounding leaves a tiny variance where x is constant.
        slope = np.where(var_x > 1e-12, cov / var_x, np.nan)
        r2 = np.where(var_y > 1e-12, slope * cov / var_y, np.nan)
        return slope, y / n - slope * x / n, r2


def group_means(values_R: Array, cluster_R: Array, clusters: int) -> Array:
    """[C] mean a cluster, NaN for one without rows."""
    count_C = np.bincount(cluster_R, minlength=clusters)
    with np.errstate(invalid="ignore"):
        return cluster_sums(values_R, cluster_R, clusters) / count_C
