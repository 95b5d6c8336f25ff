"""Sampling responses: seeds, order, stop tokens, and what the entropy estimate estimates."""

from pathlib import Path

import pytest
import torch

from bebop.data_prep.card import quantile, token_entropy
from bebop.data_prep.on_policy import (
    Prompt,
    Response,
    request_seed,
    sample_responses,
    stop_tokens,
)
from bebop.data_prep.rows import Question
from bebop.decoding.acceptance import entropy
from bebop.decoding.sampling import probs_from_logits
from bebop.models.backbone import Backbone, load_backbone
from bebop.rollout.engine import SamplingParams


@pytest.fixture(scope="module")
def backbone(tiny_backbone_dir: Path) -> Backbone:
    return load_backbone(tiny_backbone_dir)


def make_prompt(text: str, backbone: Backbone) -> Prompt:
    question = Question(text, "gsm8k", "1", {"answer": "#### 1"}, "test", 1)
    return Prompt(question, tuple(backbone.tokenizer(text)["input_ids"]))


def exact_entropies(backbone: Backbone, response: Response, temperature: float) -> torch.Tensor:
    """Entropy of the sampled distribution at each response token, [T]."""
    tokens = torch.tensor([[*response.prompt.tokens, *response.tokens]])
    with torch.no_grad():
        logits_TV = backbone.logits(backbone.hidden_states(tokens))[0]
    rows_TV = logits_TV[len(response.prompt.tokens) - 1 : -1]
    return entropy(probs_from_logits(rows_TV, temperature))


def test_the_entropy_estimate_agrees_with_the_entropy(backbone: Backbone) -> None:
    sampling = SamplingParams(temperature=0.7, max_tokens=4, stop_token_ids=stop_tokens(backbone))
    responses = sample_responses(
        backbone, [make_prompt("1 + 1", backbone)], sampling, samples=400, max_batch=64, seed=0
    )
    exact = torch.cat([exact_entropies(backbone, r, 0.7) for r in responses])
    surprise = torch.tensor([-value for r in responses for value in r.logprobs])
    error = (surprise - exact).std() / len(exact) ** 0.5
    assert abs(token_entropy(responses) - float(exact.mean())) < 4 * error
    other = torch.cat([exact_entropies(backbone, r, 1.0) for r in responses])
    assert abs(token_entropy(responses) - float(other.mean())) > 4 * error


def test_responses_come_in_prompt_order_whatever_the_batch(backbone: Backbone) -> None:
    prompts = [make_prompt(text, backbone) for text in ("1", "2 + 2 = what", "3 - 1")]
    sampling = SamplingParams(max_tokens=6, stop_token_ids=stop_tokens(backbone))

    def sampled(max_batch: int, chosen: list[Prompt]) -> list[tuple[str, tuple[int, ...]]]:
        responses = sample_responses(
            backbone, chosen, sampling, samples=2, max_batch=max_batch, seed=5
        )
        return [(r.prompt.question.text, r.tokens) for r in responses]

    together = sampled(64, prompts)
    assert [text for text, _ in together] == ["1", "1", "2 + 2 = what", "2 + 2 = what"] + [
        "3 - 1"
    ] * 2
    assert sampled(1, prompts) == together
    assert sampled(4, prompts[2:]) == together[4:]
    assert len({tokens for _, tokens in together}) > 3


def test_a_response_is_finished_exactly_when_it_ends_in_a_stop_token(backbone: Backbone) -> None:
    stop = stop_tokens(backbone)
    responses = sample_responses(
        backbone,
        [make_prompt("1", backbone)],
        SamplingParams(max_tokens=20, stop_token_ids=stop),
        samples=60,
        max_batch=32,
        seed=1,
    )
    assert {r.finished for r in responses} == {True, False}
    for response in responses:
        assert response.finished == (response.tokens[-1] in stop)
        assert "<|im_end|>" not in response.text


def test_stop_tokens_come_from_tokenizer_and_configs(tiny_backbone_dir: Path) -> None:
    backbone = load_backbone(tiny_backbone_dir)
    assert stop_tokens(backbone) == (2,)
    backbone.model.generation_config.eos_token_id = [0, 2]
    assert stop_tokens(backbone) == (0, 2)


def test_request_seeds_differ() -> None:
    seeds = {request_seed(s, p, n) for s in (0, 1) for p in ("a", "b") for n in range(3)}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_quantiles_are_values_of_the_sample() -> None:
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.95, 1.0)] == [1, 2, 3, 3]
