"""Log-probabilities, entropies and gradients against plain autograd."""

import pytest
import torch

from bebop.decoding.acceptance import entropy
from bebop.decoding.sampling import probs_from_logits
from bebop.grpo import logprobs
from bebop.grpo.logprobs import token_logprobs
from bebop.models.backbone import load_backbone
from bebop.rollout.engine import SamplingParams

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(top_k=5),
]


@pytest.fixture
def backbone(tiny_backbone_dir):
    return load_backbone(tiny_backbone_dir)


def states_and_tokens(backbone, sampling, count=17):
    """Hidden states, and tokens that lie in the filters' support."""
    hidden = torch.randn(count, backbone.hidden_size) * 2
    probs = probs_from_logits(
        backbone.logits(hidden), sampling.temperature, sampling.top_k, sampling.top_p
    )
    return hidden.requires_grad_(True), torch.multinomial(probs, 1)[:, 0], probs


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("chunk", [1, 64 * 5, 2**20])
def test_values_are_the_engines(backbone, sampling, chunk, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    hidden, tokens, probs = states_and_tokens(backbone, sampling)
    logp, entropies = token_logprobs(backbone, hidden, tokens, sampling)
    expected = probs.gather(1, tokens[:, None])[:, 0].log()
    assert torch.allclose(logp, expected, atol=1e-5)
    assert torch.allclose(entropies, entropy(probs), atol=1e-5)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_gradient_is_autograds(backbone, sampling, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 64 * 5)
    hidden, tokens, probs = states_and_tokens(backbone, sampling)
    upstream = torch.randn(len(tokens))
    logp, _ = token_logprobs(backbone, hidden, tokens, sampling)
    (got,) = torch.autograd.grad((logp * upstream).sum(), [hidden])
    scores = (backbone.lm_head(hidden) / sampling.temperature).masked_fill(probs == 0, -1e30)
    plain = torch.log_softmax(scores, -1).gather(1, tokens[:, None])[:, 0]
    (expected,) = torch.autograd.grad((plain * upstream).sum(), [hidden])
    assert torch.allclose(got, expected, atol=1e-5)


def test_a_token_outside_the_filter_stays_finite(backbone):
    sampling = SamplingParams(top_k=1)
    hidden = torch.randn(3, backbone.hidden_size)
    worst = backbone.logits(hidden).argmin(dim=-1)
    logp, _ = token_logprobs(backbone, hidden, worst, sampling)
    assert logp.isfinite().all()
    assert (logp < 0).all()


def test_entropy_has_no_gradient(backbone):
    hidden, tokens, _ = states_and_tokens(backbone, SamplingParams())
    _, entropies = token_logprobs(backbone, hidden, tokens, SamplingParams())
    assert not entropies.requires_grad
