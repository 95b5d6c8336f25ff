"""Closed forms of the objective."""

import math

import pytest
import torch

from bebop.grpo.objective import Clip, group_advantages, policy_loss, token_mean

CLIP = Clip(low=0.2, high=0.3, cap=1.5)


def test_advantages_are_centred_and_scaled_within_their_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    advantages, differs = group_advantages(rewards, divide_by_std=True)
    root = math.sqrt(3.0)
    expected = torch.tensor([[root, -1 / root, -1 / root, -1 / root], [1.0, 1.0, -1.0, -1.0]])
    assert torch.allclose(advantages, expected)
    assert differs.tolist() == [True, True]


def test_without_division_advantages_keep_the_rewards_unit():
    advantages, _ = group_advantages(torch.tensor([[3.0, 1.0]]), divide_by_std=False)
    assert advantages.tolist() == [[1.0, -1.0]]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
@pytest.mark.parametrize("divide", [True, False])
def test_equal_rewards_have_exactly_no_advantage(value, divide):
    # Seven times 0.1 does not average to 0.1 in floating point.
    advantages, differs = group_advantages(torch.full((1, 7), value), divide_by_std=divide)
    assert advantages.eq(0.0).all()
    assert not differs.any()


def gradient(logp: float, behaviour: float, advantage: float) -> tuple[float, float]:
    """Value and gradient of one token's loss."""
    x = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    result = policy_loss(x, torch.tensor([behaviour]), torch.tensor([advantage]), CLIP)
    result.loss.sum().backward()
    return float(result.loss.detach()), float(x.grad)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_a_fresh_token_has_the_policy_gradient(advantage):
    value, slope = gradient(-1.0, -1.0, advantage)
    assert value == pytest.approx(-advantage)
    assert slope == pytest.approx(-advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "slope"),
    [
        (1.2, 1.0, 1.2, 1.2),  # inside the clip
        (1.4, 1.0, 1.3, 0.0),  # good and already likelier: clipped
        (0.5, 1.0, 0.5, 0.5),  # good and less likely: still pulled up
        (0.7, -1.0, 0.8, 0.0),  # bad and already less likely: clipped
        (1.4, -1.0, 1.4, 1.4),  # bad and likelier: pushed down
        (9.0, -1.0, 1.5, 1.5),  # as before, but the weight is truncated
    ],
)
def test_clip_and_truncation_by_regime(ratio, advantage, weight, slope):
    value, derivative = gradient(math.log(ratio), 0.0, advantage)
    assert value == pytest.approx(-advantage * weight)
    assert derivative == pytest.approx(-advantage * slope)


def test_clipped_tokens_are_marked_and_ratios_are_raw():
    logp = torch.tensor([math.log(9.0), math.log(1.4), 0.0])
    result = policy_loss(logp, torch.zeros(3), torch.tensor([-1.0, 1.0, 1.0]), CLIP)
    assert torch.allclose(result.ratio, torch.tensor([9.0, 1.4, 1.0]))
    assert result.clipped.tolist() == [False, True, False]


def test_token_mean_does_not_depend_on_how_the_batch_is_cut():
    loss = torch.arange(10.0)
    whole = token_mean(loss, 10)
    parts = sum(token_mean(part, 10) for part in loss.split([1, 6, 3]))
    assert whole == parts == pytest.approx(4.5)


def test_no_token_is_zero_and_not_nan():
    assert token_mean(torch.zeros(0), 0) == 0.0
