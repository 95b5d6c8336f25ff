"""The training losses on gathered rows, a chunk of the vocabulary's logits at a time.

Only this file turns head states into a loss, so that a fused kernel replaces it as a whole.

The target is what rollouts sample from: temperature, then top-k and top-p. The draft has the
temperature only, since a filter would cut the gradient of the tokens that it should learn.

Shape suffixes: G draft depths, R rows, U distinct target rows, N rows of the flat batch,
V vocabulary, H hidden.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bebop.decoding.sampling import probs_from_logits
from bebop.decoding.teacher_forced import Rows, chunk_rows, target_values
from bebop.models.backbone import Backbone
from bebop_kernels.tv_loss.chain import chain_loss, mean_loss

Loss = Literal["kl", "tv", "e2e_tv"]


@dataclass(frozen=True)
class Target:
    """How rollouts turn the backbone's logits into a distribution."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0


def backward_rows(
    loss: Loss,
    backbone: Backbone,
    draft_GNH: Tensor,
    hidden_NH: Tensor,
    rows: Rows,
    target: Target,
    denominator: int,
) -> float:
    """Add the gradient of one micro-batch to the head's parameters; returns its share of the loss.

    The logits of one chunk of rows live at a time: their gradient is collected on the head's
    states, and one backward pass then runs through the head.

    Args:
        loss: objective.
        backbone: frozen; its lm_head serves draft and target.
        draft_GNH: head states that still have their graph.
        hidden_NH: backbone states.
        rows: rows to train.
        target: temperature and filters of the target.
        denominator: rows of the whole global batch, so that the gradient does not depend on how
            it is split.
    """
    if not len(rows.index_R):
        return 0.0
    leaf_GRH = draft_GNH[:, rows.index_R].detach().requires_grad_()
    total, start = 0.0, 0
    for part in rows.chunks(chunk_rows(backbone.vocab_size)):
        draft_GRH = leaf_GRH[:, start : start + len(part.index_R)]
        value = chunk_loss(loss, backbone, draft_GRH, hidden_NH, part, target, denominator)
        value.backward()
        total += float(value.detach())
        start += len(part.index_R)
    draft_GNH[:, rows.index_R].backward(leaf_GRH.grad)
    return total


def chunk_loss(
    loss: Loss,
    backbone: Backbone,
    draft_GRH: Tensor,
    hidden_NH: Tensor,
    rows: Rows,
    target: Target,
    denominator: int,
) -> Tensor:
    """Scalar loss of R rows, summed and divided by `denominator`; differentiable in `draft_GRH`."""

    def probs(states: Tensor) -> Tensor:
        logits = backbone.logits(states)
        return probs_from_logits(logits, target.temperature, target.top_k, target.top_p)

    p_UV, inverse_GR = target_values(rows, hidden_NH, probs)
    value_GR = torch.stack(
        [
            _distance(loss, backbone.logits(draft_RH) / target.temperature, p_UV[inverse_R])
            for draft_RH, inverse_R in zip(draft_GRH, inverse_GR, strict=True)
        ]
    )
    if loss == "e2e_tv":
        return chain_loss(1 - value_GR, rows.valid_GR, denominator)
    return mean_loss(value_GR, rows.valid_GR, denominator)


def _distance(loss: Loss, draft_RV: Tensor, p_RV: Tensor) -> Tensor:
    """KL(p || q) or d_TV(p, q) a row, from draft logits and target probabilities."""
    log_q_RV = torch.log_softmax(draft_RV.float(), dim=-1)
    if loss == "kl":
        # 0 x -inf would be NaN where a padded or filtered token has no probability on both sides.
        log_q_RV = torch.where(p_RV > 0, log_q_RV, 0.0)
        return (torch.special.xlogy(p_RV, p_RV) - p_RV * log_q_RV).sum(dim=-1)
    return 0.5 * (log_q_RV.exp() - p_RV).abs().sum(dim=-1)
