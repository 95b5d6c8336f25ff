"""Timing: interleaved, only emitted tokens, counters that add up. Real engines, tiny model."""

import math

import pytest

from bebop.models.checkpoint import load_model
from bebop.rollout.engine import alphas
from bebop.throughput.bench import PLAIN, Sample, Setting, measure_batch, total_alphas
from bebop.throughput.stage import Config
from bebop.throughput.study import torch_engines
from bebop.throughput.workload import make_workload

SETTINGS = [PLAIN, Setting("target_only", 2), Setting("rejection", 3)]
BATCH, REPEATS, TOKENS = 2, 4, 6


@pytest.fixture(scope="module")
def workload(tiny_dataset):
    config = Config(requests=4, max_tokens=TOKENS, ignore_stop=True)
    return make_workload(config, tiny_dataset, 64)


@pytest.fixture(scope="module")
def engines(tiny_policy, workload):
    backbone, head, _ = load_model(tiny_policy)
    return torch_engines(backbone, head, workload.max_length)


@pytest.fixture(scope="module")
def measured(engines, workload):
    """Samples by setting, the order of the runs, and the requests that each run got."""
    order, seen = [], []

    def make(setting, batch):
        engine = engines(setting, batch)
        generate = engine.generate
        engine.generate = lambda requests: seen.append((setting, requests)) or generate(requests)
        return engine

    samples = measure_batch(make, SETTINGS, workload, BATCH, REPEATS, order.append)
    return samples, order, seen


def test_every_repeat_runs_each_setting_once_in_a_rotating_order(measured):
    _, order, _ = measured
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == REPEATS + 1
    labels = {f"batch {BATCH}, {setting.label}" for setting in SETTINGS}
    assert all(set(names) == labels for names in rounds)
    assert len({names[0] for names in rounds[1:]}) == 3


def test_warm_up_is_not_counted(measured):
    samples, _, seen = measured
    assert {len(own) for own in samples.values()} == {REPEATS}
    assert all(request.sampling.max_tokens == 2 for _, run in seen[:3] for request in run)


def test_settings_of_a_repeat_get_the_same_requests(measured):
    _, _, seen = measured
    for first in range(0, len(seen), 3):
        runs = seen[first : first + 3]
        assert {setting for setting, _ in runs} == set(SETTINGS)
        assert runs[0][1] == runs[1][1] == runs[2][1]


@pytest.mark.parametrize(("seconds", "repeats"), [(0.0, 1), (math.inf, 3)])
def test_time_limit_ends_the_repeats_after_a_whole_one(engines, workload, seconds, repeats):
    samples = measure_batch(engines, SETTINGS, workload, 1, 3, lambda note: None, seconds=seconds)
    assert {len(own) for own in samples.values()} == {repeats}


def test_only_emitted_tokens_count_and_lengths_are_equal_without_stops(measured):
    for own in measured[0].values():
        for sample in own:
            assert sample.requests == 4
            assert sample.tokens == 4 * TOKENS


def test_plain_decoding_emits_one_token_a_round(measured):
    for sample in measured[0][PLAIN]:
        assert sample.request_rounds == sample.tokens - sample.requests
        assert sample.rounds * BATCH == sample.request_rounds
        assert sample.proposed == sample.accepted == ()


@pytest.mark.parametrize("setting", SETTINGS[1:])
def test_counts_of_drafts_add_up(measured, setting):
    for sample in measured[0][setting]:
        assert sample.proposed[0] == sample.request_rounds
        for depth in range(1, setting.gamma):
            assert sample.proposed[depth] <= sample.accepted[depth - 1]
        emitted = sample.tokens - sample.requests
        most = sum(sample.accepted) + sample.request_rounds
        assert most - setting.gamma * sample.requests <= emitted <= most
        assert sample.request_rounds < emitted or sum(sample.accepted) == 0


def test_drafts_are_accepted_at_all(measured):
    assert sum(sum(sample.accepted) for sample in measured[0][SETTINGS[2]]) > 0


def test_parts_do_not_exceed_the_whole(measured):
    for own in measured[0].values():
        for sample in own:
            assert sum(sample.parts.values()) <= sample.seconds
            assert sample.parts["prefill"] > 0


def test_engines_are_closed_when_a_run_fails(engines, workload):
    made = []

    def make(setting, batch):
        engine = engines(setting, batch)
        close = engine.close
        engine.close = lambda: made.append(setting) or close()
        if setting != PLAIN:
            engine.generate = lambda requests: 1 / 0
        return engine

    with pytest.raises(ZeroDivisionError):
        measure_batch(make, SETTINGS, workload, 1, 1, lambda note: None)
    assert made == SETTINGS


def sample(**changes):
    values = {
        "requests": 2,
        "tokens": 22,
        "seconds": 4.0,
        "parts": {"prefill": 1.5, "verify": 2.0},
        "rounds": 10,
        "request_rounds": 20,
        "proposed": (20, 5),
        "accepted": (5, 1),
    }
    return Sample(**{**values, **changes})


def test_rates_with_and_without_prefill():
    assert sample().tokens_per_second == 5.5
    assert sample().decode_tokens_per_second == 20 / 2.5


def test_acceptance_is_weighted_by_counts_not_averaged_over_runs():
    runs = [sample(proposed=(10, 1), accepted=(1, 1)), sample(proposed=(90, 9), accepted=(9, 0))]
    assert total_alphas(runs) == alphas([100, 10], [10, 1]) == [0.1, 0.1]


def test_labels_tell_settings_apart():
    assert [s.label for s in SETTINGS] == ["plain", "target-only γ=2", "rejection γ=3"]
