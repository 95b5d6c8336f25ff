"""The oracle: every loss in plain torch, one formula a function, autograd for the gradients.

Sums run over the full vocabulary in fp32 (fp64 for fp64 inputs), whatever the input dtype. The
target is detached. Padded vocabulary entries are -inf logits on both sides and take no part.

Ties: `d_TV = 1/2 sum |q - p|` has gradient `q_j (g_j - sum_v q_v g_v)`, `g = 1/2 sign(q - p)`,
with `sign(0) = 0`. `1 - sum min(p, q)` is never used: it loses all digits when p is close to q.

Shape suffixes: G draft depths, T rows, V vocabulary, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bebop_kernels.tv_loss.chain import Denominator, chain_loss, mean_loss, valid_depths


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64 (the tests' truth); everything else is summed in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tv_loss(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """`d_TV(p, q)` (eq. 10) per position: [..., V] logits -> [...] in [0, 1]."""
    q, p = _probs(draft_logits), _probs(target_logits.detach())
    return 0.5 * (q - p).abs().sum(dim=-1)


def kl_loss(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """`KL(p || q) = sum p (log p - log q)` per position, nats; gradient `q - p`."""
    log_q, log_p = _log_probs(draft_logits), _log_probs(target_logits.detach())
    p = log_p.exp()
    return (p * _difference(log_p, log_q, where=p > 0)).sum(dim=-1)


def rkl_loss(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """`KL(q || p) = sum q (log q - log p)` per position, nats."""
    log_q, log_p = _log_probs(draft_logits), _log_probs(target_logits.detach())
    q = log_q.exp()
    return (q * _difference(log_q, log_p, where=q > 0)).sum(dim=-1)


def ce_loss(draft_logits: Tensor, labels: Tensor) -> Tensor:
    """`-log q(y)` per position, nats: [..., V] logits, [...] int64 labels."""
    log_q = _log_probs(draft_logits)
    return -log_q.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def soft_ce_loss(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """`-sum p log q` per position, nats: KL plus the target's entropy, same gradient."""
    log_q, p = _log_probs(draft_logits), _probs(target_logits.detach())
    return -(p * torch.where(p > 0, log_q, 0.0)).sum(dim=-1)


def e2e_tv_loss(
    draft_logits: Tensor, target_logits: Tensor, mask: Tensor, denominator: Denominator = None
) -> tuple[Tensor, Tensor]:
    """Equation 13 on [G, T, V] logits: (scalar loss, detached alpha [G, T])."""
    valid_GT = valid_depths(mask)
    tv_GT = tv_loss(_only_valid(draft_logits, valid_GT), _only_valid(target_logits, valid_GT))
    alpha_GT = torch.where(valid_GT, 1 - tv_GT, 0.0)
    return chain_loss(alpha_GT, valid_GT, denominator), alpha_GT.detach()


def linear_loss(
    name: str,
    draft_hidden: Tensor,
    target_hidden: Tensor | None,
    weight: Tensor,
    target_weight: Tensor,
    mask: Tensor,
    labels: Tensor | None,
    denominator: Denominator,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Every loss of the fused-linear family, with the whole [G, T, V] held: (loss, value [G, T]).

    The value is alpha for "e2e_tv" and the per-position loss for the others.
    """
    valid_GT = valid_depths(mask)
    draft_GTV = _only_valid(draft_hidden @ weight.T, valid_GT) / temperature
    if name == "ce" and labels is not None:
        value_GT = ce_loss(draft_GTV, torch.where(valid_GT, labels, 0))
    else:
        assert target_hidden is not None
        value_GT = _soft_values(
            name, draft_GTV, _target_logits(target_hidden, target_weight, valid_GT, temperature)
        )
    if name == "e2e_tv":
        alpha_GT = torch.where(valid_GT, 1 - value_GT, 0.0)
        return chain_loss(alpha_GT, valid_GT, denominator), alpha_GT.detach()
    value_GT = torch.where(valid_GT, value_GT, 0.0)
    return mean_loss(value_GT, valid_GT, denominator), value_GT.detach()


def _soft_values(name: str, draft_GTV: Tensor, target_GTV: list[Tensor]) -> Tensor:
    loss = {"e2e_tv": tv_loss, "tv": tv_loss, "kl": kl_loss, "rkl": rkl_loss, "ce": soft_ce_loss}
    rows = [loss[name](d_TV, t_TV) for d_TV, t_TV in zip(draft_GTV, target_GTV, strict=True)]
    return torch.stack(rows)


def _target_logits(
    target_hidden: Tensor, weight: Tensor, valid_GT: Tensor, temperature: float
) -> list[Tensor]:
    """One [T, V] a depth: views of one product where the rows are shared between depths."""
    with torch.no_grad():
        logits = (target_hidden @ weight.T) / temperature
    depths, rows = valid_GT.shape
    if target_hidden.dim() == 2:
        logits_GTV = [logits[i : i + rows] for i in range(1, depths + 1)]
    else:
        logits_GTV = list(logits)
    return [_only_valid(x, valid) for x, valid in zip(logits_GTV, valid_GT, strict=True)]


def _only_valid(x: Tensor, valid: Tensor) -> Tensor:
    """Rows outside the mask become 0, because 0 x NaN would leak into the gradient."""
    return x if bool(valid.all()) else x.masked_fill(~valid.unsqueeze(-1), 0.0)


def _difference(a: Tensor, b: Tensor, where: Tensor) -> Tensor:
    """a - b, 0 where the weight in front of it is 0 (there both may be -inf)."""
    return torch.where(where, a, 0.0) - torch.where(where, b, 0.0)


def _probs(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1, dtype=accumulation_dtype(logits.dtype))


def _log_probs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1, dtype=accumulation_dtype(logits.dtype))
