"""The losses in torch, a cache-sized block of rows at a time, with their gradients in place.

Nothing but the block is held: the draft's logits become their own gradient. Each loss is three
small functions over a block, so that a split vocabulary can reduce between the second and third.

Shape suffixes: N rows of logits, M target rows, R rows of a block, V vocabulary (local part),
G draft depths, T rows of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop_kernels.tv_loss.parallel import Group, all_max, all_sum

BLOCK_ELEMENTS = 2**17


@dataclass(frozen=True)
class BlockLoss:
    """A per-position loss as operations on a block [R, V].

    `stats(draft, target, scratch)` returns (value [R], aux [R]), both plain sums over V, and
    leaves in `scratch[0]` what `grad_(draft, scratch[0], aux)` needs to turn `draft` into
    d value / d z. `scratch` is [2, R, V]: at this size a fresh buffer costs more than a pass.
    """

    logarithms: bool  # draft and target come as log-probabilities, not probabilities
    stats: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    grad_: Callable[[Tensor, Tensor, Tensor], object]


def _tv_stats(q: Tensor, p: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    sign, product = scratch
    torch.sub(q, p, out=sign)
    value = torch.abs(sign, out=product).sum(dim=-1).mul_(0.5)
    return value, _dot(q, sign.sign_(), product)


def _tv_grad_(q: Tensor, sign: Tensor, aux: Tensor) -> None:
    q.mul_(sign.sub_(aux.unsqueeze(-1)).mul_(0.5))


def _kl_stats(log_q: Tensor, log_p: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    p, ratio = scratch
    torch.exp(log_p, out=p)
    torch.sub(log_p, log_q, out=ratio).masked_fill_(p == 0, 0.0)
    value = _dot(p, ratio, ratio)
    return value, torch.zeros_like(value)


def _ce_stats(log_q: Tensor, log_p: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    p, log_q_used = scratch
    torch.exp(log_p, out=p)
    log_q_used.copy_(log_q).masked_fill_(p == 0, 0.0)
    value = -_dot(p, log_q_used, log_q_used)
    return value, torch.zeros_like(value)


def _kl_grad_(log_q: Tensor, p: Tensor, aux: Tensor) -> None:
    log_q.exp_().sub_(p)


def _rkl_stats(log_q: Tensor, log_p: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    ratio, q = scratch
    torch.exp(log_q, out=q)
    torch.sub(log_q, log_p, out=ratio).masked_fill_(q == 0, 0.0)
    value = _dot(q, ratio, q)
    return value, value.clone()


def _rkl_grad_(log_q: Tensor, ratio: Tensor, aux: Tensor) -> None:
    log_q.exp_().mul_(ratio.sub_(aux.unsqueeze(-1)))


TV = BlockLoss(False, _tv_stats, _tv_grad_)
LOSSES = {
    "tv": TV,
    "e2e_tv": TV,
    "kl": BlockLoss(True, _kl_stats, _kl_grad_),
    "rkl": BlockLoss(True, _rkl_stats, _rkl_grad_),
    "ce": BlockLoss(True, _ce_stats, _kl_grad_),
}


def soft_loss_(
    name: str, draft_NV: Tensor, target_MV: Tensor, target_of_N: Tensor, group: Group, grad: bool
) -> Tensor:
    """Values [N] of a loss against a target distribution; `draft_NV` becomes d value / d z.

    Both logits buffers are overwritten. With a group, V is this rank's slice.
    """
    loss = LOSSES[name]
    normalise_(draft_NV, group, loss.logarithms)
    normalise_(target_MV, group, loss.logarithms)
    rows = max(1, BLOCK_ELEMENTS // draft_NV.shape[1]) if draft_NV.is_cpu else len(draft_NV)
    scratch_2RV = draft_NV.new_empty(2, min(rows, len(draft_NV)), draft_NV.shape[1])
    value_N, aux_N = draft_NV.new_empty(2, len(draft_NV))

    def sweep(*, measure: bool, form: bool) -> None:
        for first in range(0, len(draft_NV), rows):
            block = slice(first, first + rows)
            q, p = draft_NV[block], _take(target_MV, target_of_N[block])
            scratch = scratch_2RV[:, : len(q)]
            value, aux = loss.stats(q, p, scratch)
            if measure:
                value_N[block], aux_N[block] = value, aux
            if form:
                loss.grad_(q, scratch[0], aux_N[block])

    if group is None:
        sweep(measure=True, form=grad)
        return value_N
    sweep(measure=True, form=False)
    value_N, aux_N = all_sum(torch.stack((value_N, aux_N)), group)
    if grad:
        sweep(measure=False, form=True)
    return value_N


def hard_loss_(draft_NV: Tensor, label_N: Tensor, group: Group, grad: bool) -> Tensor:
    """`-log q(y)` [N]; `draft_NV` becomes `q - onehot(y)`.

    `label_N` counts from this rank's first entry; labels of other ranks fall outside [0, V).
    """
    normalise_(draft_NV, group, logarithms=True)
    here_N = (label_N >= 0) & (label_N < draft_NV.shape[1])
    column_N1 = torch.where(here_N, label_N, 0).unsqueeze(-1)
    value_N = torch.where(here_N, -draft_NV.gather(-1, column_N1).squeeze(-1), 0.0)
    if grad:
        draft_NV.exp_().scatter_add_(-1, column_N1, -here_N.to(draft_NV.dtype).unsqueeze(-1))
    return all_sum(value_N, group)


def normalise_(logits_NV: Tensor, group: Group, logarithms: bool) -> None:
    """Softmax or log-softmax in place, over the vocabulary of all ranks."""
    if group is None:
        kernel = torch.ops.aten._log_softmax if logarithms else torch.ops.aten._softmax
        kernel.out(logits_NV, -1, False, out=logits_NV)
        return
    logits_NV.sub_(all_max(logits_NV.amax(dim=-1, keepdim=True), group))
    if logarithms:
        logits_NV.sub_(all_sum(logits_NV.exp().sum(dim=-1, keepdim=True), group).log_())
    else:
        logits_NV.div_(all_sum(logits_NV.exp_().sum(dim=-1, keepdim=True), group))


def _take(target_MV: Tensor, index_R: Tensor) -> Tensor:
    """Target rows of a block: a view of one row, a copy (which stays in cache) of several."""
    if len(index_R) == 1 and index_R.is_cpu:
        return target_MV[int(index_R)].unsqueeze(0)
    return target_MV.index_select(0, index_R)


def _dot(a_RV: Tensor, b_RV: Tensor, product_RV: Tensor) -> Tensor:
    """Row by row, through a buffer: `torch.sum` adds pairwise, BLAS dots lose digits at large V."""
    return torch.mul(a_RV, b_RV, out=product_RV).sum(dim=-1)
