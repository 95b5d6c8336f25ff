"""Every setting gets the same requests, and every repeat other random numbers."""

import json

import pytest
from tests.small_dataset import manifest

from bebop.throughput.stage import Config
from bebop.throughput.workload import WARM_UP, make_workload, workload_sampling

VOCABULARY = 64


@pytest.fixture
def workload(tiny_dataset):
    config = Config(prompts=5, requests=3, max_tokens=7, seed=2)
    return make_workload(config, tiny_dataset, VOCABULARY)


@pytest.mark.parametrize(("batch", "count"), [(1, 3), (2, 4), (3, 3), (8, 8)])
def test_batches_are_full(workload, batch, count):
    assert workload.count(batch) == count
    assert len(workload.requests(batch, 0)) == count


def test_requests_of_a_repeat_are_always_the_same(workload):
    assert workload.requests(4, 1) == workload.requests(4, 1)


def test_no_two_requests_share_their_random_numbers(workload):
    seeds = [r.seed for repeat in range(WARM_UP, 5) for r in workload.requests(8, repeat)]
    assert len(set(seeds)) == len(seeds)


def test_stage_seed_changes_every_request(workload, tiny_dataset):
    other = make_workload(Config(seed=3), tiny_dataset, VOCABULARY)
    own = {r.seed for r in workload.requests(8, 0)}
    assert own.isdisjoint(r.seed for r in other.requests(8, 0))


def test_prompts_are_taken_in_turn(workload):
    prompts = [request.prompt for request in workload.requests(8, 0)]
    assert len(set(prompts)) == 5
    assert prompts[:3] == prompts[5:]


def test_warm_up_is_short_and_fills_the_batch(workload):
    requests = workload.requests(4, WARM_UP)
    assert len(requests) == 4
    assert {r.sampling.max_tokens for r in requests} == {2}
    assert {r.sampling.max_tokens for r in workload.requests(4, 0)} == {7}


def test_longest_request_fits_the_engine(workload):
    longest = max(len(r.prompt) + r.sampling.max_tokens for r in workload.requests(8, 0))
    assert workload.max_length == longest


def test_sampling_is_the_dataset_s_unless_the_config_says_otherwise(tmp_path):
    record = manifest(temperature=0.7, top_p=0.9, top_k=5)
    (tmp_path / "manifest.json").write_text(json.dumps(record))
    own = workload_sampling(Config(), tmp_path)
    assert (own.temperature, own.top_p, own.top_k) == (0.7, 0.9, 5)
    assert own.stop_token_ids == (2,)
    changed = workload_sampling(Config(temperature=0.0, top_k=0, ignore_stop=True), tmp_path)
    assert (changed.temperature, changed.top_p, changed.top_k) == (0.0, 0.9, 0)
    assert changed.stop_token_ids == ()
