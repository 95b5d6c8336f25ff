"""The GRPO objective as pure functions: advantages, clipped ratio, truncation, normalisation.

Shape suffixes: K prompt groups, S samples a group, N response tokens of the whole global batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """Bounds of the importance ratio w = p_policy / p_behaviour.

    Attributes:
        low: a token with a negative advantage stops pulling once w < 1 - low.
        high: a token with a positive advantage stops pulling once w > 1 + high.
        cap: no token weighs more than this, however stale (truncated importance sampling).
    """

    low: float
    high: float
    cap: float


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token loss and what the ratio did, each [N].

    Attributes:
        loss: differentiable in the policy's log-probabilities.
        ratio: w, detached, before clipping and truncation.
        clipped: tokens without gradient.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def group_advantages(rewards_KS: Tensor, *, divide_by_std: bool) -> tuple[Tensor, Tensor]:
    """Advantage of each sample against its own group.

    Args:
        rewards_KS: rewards, any real values.
        divide_by_std: divide by the group's standard deviation (of the population, 1/S).

    Returns:
        Advantages [K, S], and the groups [K] (boolean) whose samples differ. A group of equal
        rewards says nothing about which sample was better: its advantages are exactly 0.
    """
    mean_K1 = rewards_KS.mean(dim=1, keepdim=True)
    # Compared exactly: the mean of equal rewards can be off by rounding.
    differs_K = (rewards_KS != rewards_KS[:, :1]).any(dim=1)
    centred_KS = torch.where(differs_K[:, None], rewards_KS - mean_K1, 0.0)
    if not divide_by_std:
        return centred_KS, differs_K
    std_K1 = centred_KS.square().mean(dim=1, keepdim=True).sqrt()
    return centred_KS / torch.where(differs_K[:, None], std_K1, 1.0), differs_K


def policy_loss(logp_N: Tensor, behaviour_N: Tensor, advantage_N: Tensor, clip: Clip) -> PolicyLoss:
    """Clipped surrogate with truncated importance weights, one value a token.

    With w = exp(logp - behaviour) the gradient of a token's loss is `-min(w, cap) A d logp`, or 0
    where clipping holds: A > 0 and w > 1 + high, or A < 0 and w < 1 - low. A fresh token has
    w = 1 up to rounding, so that nothing here touches it; a stale one is corrected.

    Args:
        logp_N: log-probability under the policy being trained, differentiable.
        behaviour_N: log-probability under the policy that sampled the token.
        advantage_N: advantage of the token's sample.
        clip: bounds of w.
    """
    ratio_N = torch.exp(logp_N - behaviour_N)
    too_high_N = (advantage_N > 0) & (ratio_N > 1 + clip.high)
    too_low_N = (advantage_N < 0) & (ratio_N < 1 - clip.low)
    clipped_N = (too_high_N | too_low_N).detach()
    fixed_N = ratio_N.detach().clamp(1 - clip.low, 1 + clip.high)
    weight_N = ratio_N.detach().clamp(max=clip.cap)
    # Value min(w, cap), gradient min(w, cap) d logp: exp(x - x.detach()) is 1 with gradient dx.
    truncated_N = weight_N * torch.exp(logp_N - logp_N.detach())
    loss_N = -advantage_N * torch.where(clipped_N, fixed_N, truncated_N)
    return PolicyLoss(loss_N, ratio_N.detach(), clipped_N)


def token_mean(loss_N: Tensor, denominator: int) -> Tensor:
    """Sum over a micro-batch, divided by the tokens of the whole global batch.

    Every token weighs the same, long answers more than short ones, and the gradient does not
    depend on how the batch is cut. No token at all gives 0.
    """
    return loss_N.sum() / max(denominator, 1)
