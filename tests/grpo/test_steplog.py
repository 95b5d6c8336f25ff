"""Metrics of a step and of a run, counted by hand."""

import pytest
import torch
from tests.grpo.conftest import write_diagnosis

from bebop.grpo.curves import alarms, outside
from bebop.grpo.setup import read_entropy_range
from bebop.grpo.speculation import choose_speculation
from bebop.grpo.steplog import decoded_metrics, length_metrics, run_metrics, update_metrics
from bebop.grpo.trainer import Update
from bebop.rollout.engine import Completion, Speculation


def test_decoded_acceptance_is_pooled_over_completions():
    completions = [
        Completion("a", proposed=[4, 2], accepted=[2, 1]),
        Completion("b", proposed=[6, 6], accepted=[6, 3]),
    ]
    assert decoded_metrics(completions) == {
        "accept/decoded_length": 1 + 12 / 10,
        "accept/decoded_alpha_1": 0.8,
        "accept/decoded_alpha_2": 0.5,
    }


def test_plain_decoding_has_no_decoded_acceptance():
    assert decoded_metrics([Completion("a"), Completion("b", proposed=[0], accepted=[0])]) == {}


def test_lengths_count_the_cut_ones():
    completions = [
        Completion("a", tokens=[1, 2], finish_reason="stop"),
        Completion("b", tokens=[1, 2, 3, 4], finish_reason="length"),
    ]
    assert length_metrics(completions) == {"length/response": 3.0, "length/truncated": 0.5}


def test_an_updates_tensors_become_means_and_maxima():
    update = Update(
        loss=0.5,
        grad_norm=2.0,
        kept_groups=3,
        entropy_N=torch.tensor([1.0, 3.0]),
        ratio_N=torch.tensor([0.5, 1.0]),
        clipped_N=torch.tensor([True, False]),
        staleness_N=torch.tensor([0, 2]),
    )
    metrics = update_metrics(update, groups=4)
    assert metrics["entropy/target"] == 2.0
    assert metrics["ratio/mean"] == 0.75
    assert metrics["ratio/max"] == 1.0
    assert metrics["ratio/clip_share"] == 0.5
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 2.0)
    assert metrics["groups/zero_variance"] == 0.25


def test_a_run_is_its_last_quarter_and_its_gain():
    history = [{"reward/mean": r, "perf/step_seconds": r} for r in (0.1, 0.3, 0, 0, 0, 0, 0.5, 0.7)]
    metrics = run_metrics(history)
    assert metrics["reward/mean"] == pytest.approx(0.6)
    assert metrics["reward/gain"] == pytest.approx(0.4)
    assert metrics["perf/step_seconds"] == pytest.approx(0.2)
    assert metrics["train/steps"] == 8


def test_flat_rewards_are_named_in_the_report():
    flat = [{"reward/mean": 0.0}] * 2
    assert alarms(flat) == [
        "Alarm: every reward of the run is 0. The task is too hard, or the answer is not found."
    ]
    assert alarms([*flat, {"reward/mean": 0.4}]) == ["Alarm: every reward is 0 in steps [1, 2]."]
    assert alarms([{"reward/mean": 0.4}]) == []


@pytest.mark.parametrize(
    ("choice", "gamma", "expected"),
    [
        ("auto", 0, Speculation("target_only", 2)),
        ("auto", 4, Speculation("target_only", 4)),
        ("rejection", 0, Speculation("rejection", 2)),
        ("rejection", 1, Speculation("rejection", 1)),
        ("off", 0, Speculation("off", 2)),
    ],
)
def test_speculation_is_as_configured_or_as_recommended(tmp_path, choice, gamma, expected):
    diagnosis = write_diagnosis(tmp_path, "target_only", 2)
    assert choose_speculation(choice, gamma, diagnosis) == expected


def test_entropy_outside_the_training_texts_range_is_noted():
    history = [{"entropy/target": value} for value in (1.0, 0.4, 2.1)]
    (note,) = outside(history, read_entropy_range({"entropy": {"p05": 0.5, "p95": 2.0}}))
    assert "steps [2, 3]" in note
    assert outside(history, (0.0, 3.0)) == []
    assert outside(history, read_entropy_range({"entropy": None})) == []
