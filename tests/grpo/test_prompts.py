"""The prompt stream is a pure function of seed and number."""

import json
from collections import Counter

import pytest
from tests.grpo.conftest import PROMPTS

from bebop.dataset import read_prompts
from bebop.errors import StageError
from bebop.grpo.prompts import PromptStream, derived_seed
from bebop.grpo.scoring import Scorer
from bebop.models.backbone import load_backbone
from bebop.rollout.engine import Completion, SamplingParams


@pytest.fixture
def prompts(inputs):
    return read_prompts(inputs["dataset"], "train", 64)


def stream(prompts, seed=0):
    return PromptStream(prompts, 4, SamplingParams(), seed)


def test_every_epoch_holds_each_prompt_once_in_its_own_order(prompts):
    ids = [stream(prompts).prompt(n).prompt_id for n in range(3 * PROMPTS)]
    epochs = [ids[start : start + PROMPTS] for start in range(0, len(ids), PROMPTS)]
    assert all(sorted(epoch) == sorted(p.prompt_id for p in prompts) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_requests_are_the_same_in_another_process_and_differ_by_seed(prompts):
    assert stream(prompts).requests(5) == stream(prompts).requests(5)
    assert stream(prompts, 1).requests(5) != stream(prompts).requests(5)
    # A fixed value, so that a checkpoint of one machine goes on upon another.
    assert derived_seed(0, "sample", 5, 1) == derived_seed(0, "sample", 5, 1) < 2**63


def test_ids_and_seeds_are_unique_in_a_run(prompts):
    requests = [r for n in range(50) for r in stream(prompts).requests(n)]
    assert len({r.id for r in requests}) == len({r.seed for r in requests}) == len(requests)


def test_samples_of_a_group_share_the_prompt(prompts):
    requests = stream(prompts).requests(0)
    assert Counter(r.prompt for r in requests) == {stream(prompts).prompt(0).tokens: 4}


def test_rewards_come_from_the_tasks_verifier(prompts, inputs):
    tokenizer = load_backbone(inputs["model"]).tokenizer
    scorer = Scorer(tokenizer, prompts)
    texts = [prompts[0].gold, f"it is {prompts[0].gold}.", "", "i do not know", "11"]
    completions = [Completion("x", tokens=tokenizer(text)["input_ids"]) for text in texts]
    assert scorer.rewards(prompts[0], completions) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_gold_answer_that_does_not_score_stops_the_stage(prompts, inputs):
    tokenizer = load_backbone(inputs["model"]).tokenizer
    wrong = type(prompts[0])(**{**vars(prompts[0]), "gold": "77", "entry": {"answer": "3"}})
    with pytest.raises(StageError, match="gold answer '77'"):
        Scorer(tokenizer, [wrong])
    assert json.dumps(wrong.entry)
