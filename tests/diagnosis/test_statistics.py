"""Intervals that know their clusters, and slopes."""

import numpy as np
import pytest

from bebop.diagnosis.statistics import bootstrap_weights, fit_line, group_means, mean_interval


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    clusters, size, covered = 30, 8, 0
    cluster_R = np.repeat(np.arange(clusters), size)
    for trial in range(200):
        shared_R = np.repeat(generator.normal(size=clusters), size)
        values_R = 2.0 + shared_R + 0.3 * generator.normal(size=clusters * size)
        weights = bootstrap_weights(clusters, 200, seed=trial)
        interval = mean_interval(values_R, cluster_R, weights)
        covered += interval.low <= 2.0 <= interval.high
    assert 0.86 < covered / 200 <= 0.99


def test_interval_widens_when_rows_are_copies_of_their_prompt() -> None:
    values_R = np.repeat(np.arange(10.0), 50)
    grouped = mean_interval(values_R, np.repeat(np.arange(10), 50), bootstrap_weights(10, 500, 0))
    single = mean_interval(values_R, np.arange(500), bootstrap_weights(500, 500, 0))
    assert grouped.high - grouped.low > 4 * (single.high - single.low)


def test_line_recovers_slope_and_intercept() -> None:
    generator = np.random.default_rng(0)
    x_R = generator.uniform(0, 3, size=600)
    y_R = 2.5 - 0.4 * x_R + 0.1 * generator.normal(size=600)
    line = fit_line(x_R, y_R, np.repeat(np.arange(30), 20), bootstrap_weights(30, 300, 0), "row")
    assert line.slope == pytest.approx(-0.4, abs=0.02)
    assert line.intercept == pytest.approx(2.5, abs=0.03)
    assert line.slope_low < line.slope < line.slope_high < 0
    assert (line.slope, line.intercept) == pytest.approx(tuple(np.polyfit(x_R, y_R, 1)))


def test_a_constant_regressor_has_no_slope() -> None:
    line = fit_line(np.ones(8), np.arange(8.0), np.arange(8), bootstrap_weights(8, 50, 0), "row")
    assert np.isnan(line.slope)


def test_levels_can_disagree() -> None:
    """Within each group y falls with x, between groups it rises."""
    x_R = np.array([0.0, 1.0, 10.0, 11.0])
    y_R = np.array([1.0, 0.0, 6.0, 5.0])
    group_R = np.array([0, 0, 1, 1])
    weights = bootstrap_weights(2, 50, 0)
    within = fit_line(x_R[:2], y_R[:2], group_R[:2], weights, "position")
    means = [group_means(v, group_R, 2) for v in (x_R, y_R)]
    between = fit_line(*means, np.arange(2), weights, "prompt")
    assert within.slope < 0 < between.slope


def test_no_rows_give_no_interval() -> None:
    interval = mean_interval(np.zeros(0), np.zeros(0, dtype=int), bootstrap_weights(3, 50, 0))
    assert np.isnan(interval.mean)
