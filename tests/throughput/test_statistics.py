"""Spread and correlation, on closed forms."""

import pytest

from bebop.throughput.statistics import Spread, correlation, spread


def test_spread_of_five_values():
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, pytest.approx(1.8), pytest.approx(4.2))


def test_spread_of_one_value_is_that_value():
    assert spread([2.0]) == Spread(2.0, 2.0, 2.0)


def test_median_ignores_one_wild_repeat():
    assert spread([1.0, 1.0, 1000.0]).median == 1.0


def test_spread_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no repeat"):
        spread([])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Spread(1.234, 1.0, 2.0), "1.23 (1 to 2)"),
        (Spread(3279.6, 99.96, 4000), "3280 (100 to 4000)"),
    ],
)
def test_spread_reads_well(value, text):
    assert str(value) == text


def test_correlation_of_lines_and_of_constants():
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
    assert correlation([1, 2, 3], [6, 4, 2]) == pytest.approx(-1.0)
    assert correlation([1, 1, 1], [1, 2, 3]) is None
    assert correlation([1, 2], [1, 2]) is None
