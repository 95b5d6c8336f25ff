"""How much a draft distribution q is worth against a target p: the definitions, in one place.

All statistics run over the full last dimension, in fp32 (float64 stays float64). A depth's
acceptance is conditional (every earlier draft was accepted) unless a name says cumulative.

Shape suffixes: V vocabulary, G depths; leading dimensions are free.
"""

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def tv_distance(p: Tensor, q: Tensor) -> Tensor:
    """Total variation distance, half the L1 distance: [..., V] x 2 -> [...].

    The form 1 - sum(min) loses all digits when p and q are close and V is large.
    """
    return 0.5 * (_wide(p) - _wide(q)).abs().sum(-1)


def alpha_rs(p: Tensor, q: Tensor) -> Tensor:
    """Acceptance of a sampled draft, sum(min(p, q)) = 1 - TV (arXiv 2606.12370 eq. 2)."""
    return 1.0 - tv_distance(p, q)


def alpha_to(p: Tensor, q: Tensor) -> Tensor:
    """Acceptance of a greedy draft, p at the argmax of q (arXiv 2606.12370 eq. 1)."""
    return _wide(p).gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1)


def rejection_pays(p: Tensor, q: Tensor) -> Tensor:
    """Where a sampled draft is accepted more often: TV < 1 - p(argmax q) (eq. 48)."""
    return tv_distance(p, q) < 1.0 - alpha_to(p, q)


def entropy(p: Tensor) -> Tensor:
    """Shannon entropy in nats, with 0 log 0 = 0 (eq. 4): [..., V] -> [...]."""
    return torch.special.entr(_wide(p)).sum(-1)


def cumulative(alpha_G: Tensor) -> Tensor:
    """Probability that the drafts up to each depth are all accepted: [..., G] -> [..., G]."""
    return _wide(alpha_G).cumprod(-1)


def expected_length(alpha_G: Tensor) -> Tensor:
    """Expected accepted drafts a round, without the bonus token (eq. 12): [..., G] -> [...]."""
    return cumulative(alpha_G).sum(-1)


def accept_rate(alpha_G: Tensor) -> Tensor:
    """Expected accepted drafts over gamma, as result tables report it: [..., G] -> [...]."""
    return expected_length(alpha_G) / alpha_G.shape[-1]
