"""Metric names: families by pattern, anything else refused."""

import pytest

from bebop.metrics import METRICS, unknown_metrics


@pytest.mark.parametrize(
    "name",
    [
        "accept/alpha_1",
        "accept/alpha_to_12",
        "reward/mean",
        "speedup/target_only_g3_b8",
        "speedup/rejection_g1_b1",
    ],
)
def test_members_of_a_family_are_known(name):
    assert unknown_metrics([name]) == []


@pytest.mark.parametrize(
    "name",
    [
        "accept/alpha",
        "accept/alpha_",
        "accept/alpha_1/extra",
        "accept/alpha_1_2",
        "rewards/mean",
        "reward/mean2",
        "speedup/greedy_g3_b8",
        "",
    ],
)
def test_other_names_are_unknown(name):
    assert unknown_metrics([name]) == [name]


def test_every_metric_has_a_definition_and_a_name_that_mlflow_takes():
    for name, meaning in METRICS.items():
        assert len(meaning) > 10, name
        plain = name.replace("{", "").replace("}", "")
        assert all(c.isalnum() or c in "_/-." for c in plain), name
