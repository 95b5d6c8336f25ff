"""Launches of the Triton kernels, with the signatures of `chunked.py` and `logits.py`.

Imported only when Triton is asked for. Shape suffixes: N rows of draft logits, M target rows,
V vocabulary (local part), G depths, T rows of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bebop_kernels.tv_loss import fused
from bebop_kernels.tv_loss.parallel import Group, all_sum, merge_softmax_stats

KIND = {"tv": 0, "e2e_tv": 0, "kl": 1, "rkl": 2, "ce": 3}
BLOCK_V = 4096
LAUNCH = {"BLOCK": BLOCK_V, "num_warps": 8}


@dataclass(frozen=True)
class Rows:
    """N rows of V logits anywhere in a buffer, with their softmax statistics."""

    data: Tensor
    offset_N: Tensor  # int64, in elements from data_ptr
    max_N: Tensor
    sum_N: Tensor

    def take(self, index_N: Tensor) -> Rows:
        return Rows(self.data, self.offset_N[index_N], self.max_N[index_N], self.sum_N[index_N])

    @property
    def pointers(self) -> tuple[Tensor, Tensor]:
        return self.data, self.offset_N

    @property
    def stats(self) -> tuple[Tensor, Tensor]:
        return self.max_N, self.sum_N


def soft_loss_(
    name: str, draft_NV: Tensor, target_MV: Tensor, target_of_N: Tensor, group: Group, grad: bool
) -> Tensor:
    """Values [N] of a loss against a target distribution; `draft_NV` becomes d value / d z."""
    vocab = draft_NV.shape[1]
    draft = _normalised(draft_NV, _row_offsets(draft_NV), vocab, group)
    target = _normalised(target_MV, _row_offsets(target_MV), vocab, group).take(target_of_N)
    value_N, aux_N = _loss_stats(name, draft, target, vocab, group)
    if grad:
        ones_N = torch.ones_like(value_N)
        _loss_grad(name, draft, target, aux_N, ones_N, draft.pointers, vocab)
    return value_N


def hard_loss_(draft_NV: Tensor, label_N: Tensor, group: Group, grad: bool) -> Tensor:
    """`-log q(y)` [N]; `draft_NV` becomes `q - onehot(y)`. Labels count from this rank's first."""
    vocab = draft_NV.shape[1]
    draft = _normalised(draft_NV, _row_offsets(draft_NV), vocab, group)
    value_N = all_sum(_hard_value(draft, label_N, vocab), group)
    if grad:
        _hard_grad(draft, label_N, torch.ones_like(value_N), draft.pointers, vocab)
    return value_N


def logits_loss(
    name: str,
    draft_GTV: Tensor,
    target_GTV: Tensor | None,
    label_GT: Tensor | None,
    valid_GT: Tensor,
) -> Tensor:
    """Per-position loss [G, T], 0 where not valid; gradient to `draft_GTV`, where valid."""
    return _LogitsLoss.apply(name, draft_GTV, target_GTV, label_GT, valid_GT)


class _LogitsLoss(torch.autograd.Function):
    """Saves its inputs and a few numbers a row; the gradient is recomputed from them."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        draft_GTV: Tensor,
        target_GTV: Tensor | None,
        label_GT: Tensor | None,
        valid_GT: Tensor,
    ) -> Tensor:
        draft_GTV, vocab = _unit_stride(draft_GTV), draft_GTV.shape[-1]
        depth_N, row_N = valid_GT.nonzero(as_tuple=True)
        draft = _normalised(draft_GTV, _offsets(draft_GTV, depth_N, row_N), vocab, None)
        if label_GT is not None:
            other, extra_N = None, label_GT[depth_N, row_N]
            value_N = _hard_value(draft, extra_N, vocab)
        else:
            assert target_GTV is not None
            target_GTV = _unit_stride(target_GTV)
            other = _normalised(target_GTV, _offsets(target_GTV, depth_N, row_N), vocab, None)
            value_N, extra_N = _loss_stats(name, draft, other, vocab, None)
        ctx.name = name
        _save(ctx, draft, other, extra_N, depth_N, row_N)
        value_GT = value_N.new_zeros(valid_GT.shape)
        value_GT[depth_N, row_N] = value_N
        return value_GT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_GT: Tensor) -> tuple[None, Tensor, None, None, None]:
        draft, other, extra_N, depth_N, row_N = _load(ctx)
        vocab = draft.data.shape[-1]
        grad_GTV = torch.zeros_like(draft.data, memory_format=torch.contiguous_format)
        destination = (grad_GTV, _offsets(grad_GTV, depth_N, row_N))
        scale_N = upstream_GT[depth_N, row_N].float().contiguous()
        if other is None:
            _hard_grad(draft, extra_N, scale_N, destination, vocab)
        else:
            _loss_grad(ctx.name, draft, other, extra_N, scale_N, destination, vocab)
        return None, grad_GTV, None, None, None


def _save(ctx: Any, draft: Rows, other: Rows | None, *small: Tensor) -> None:
    rows = [draft] if other is None else [draft, other]
    fields = [x for row in rows for x in (*row.pointers, *row.stats)]
    ctx.save_for_backward(*small, *fields)


def _load(ctx: Any) -> tuple[Rows, Rows | None, Tensor, Tensor, Tensor]:
    extra_N, depth_N, row_N, *fields = ctx.saved_tensors
    other = Rows(*fields[4:]) if len(fields) > 4 else None
    return Rows(*fields[:4]), other, extra_N, depth_N, row_N


def _unit_stride(x_GTV: Tensor) -> Tensor:
    return x_GTV if x_GTV.stride(-1) == 1 else x_GTV.contiguous()


def _offsets(x_GTV: Tensor, depth_N: Tensor, row_N: Tensor) -> Tensor:
    return depth_N * x_GTV.stride(0) + row_N * x_GTV.stride(1)


def _row_offsets(x_NV: Tensor) -> Tensor:
    return torch.arange(len(x_NV), device=x_NV.device) * x_NV.stride(0)


def _normalised(data: Tensor, offset_N: Tensor, vocab: int, group: Group) -> Rows:
    _check_runnable(data)
    max_N = torch.empty(len(offset_N), device=data.device)
    sum_N = torch.empty_like(max_N)
    if len(offset_N):
        with torch.cuda.device_of(data):
            fused.softmax_stats_kernel[(len(offset_N),)](
                data, offset_N, max_N, sum_N, vocab, **LAUNCH
            )
    return Rows(data, offset_N, *merge_softmax_stats(max_N, sum_N, group))


def _loss_stats(
    name: str, draft: Rows, target: Rows, vocab: int, group: Group
) -> tuple[Tensor, Tensor]:
    value_N, aux_N = torch.empty_like(draft.max_N), torch.empty_like(draft.max_N)
    if len(value_N):
        with torch.cuda.device_of(value_N):
            fused.loss_stats_kernel[(len(value_N),)](
                *(*draft.pointers, *target.pointers, *draft.stats, *target.stats),
                *(value_N, aux_N, vocab),
                KIND=KIND[name],
                **LAUNCH,
            )
    if group is None:
        return value_N, aux_N
    value_N, aux_N = all_sum(torch.stack((value_N, aux_N)), group)
    return value_N, aux_N


def _loss_grad(
    name: str,
    draft: Rows,
    target: Rows,
    aux_N: Tensor,
    scale_N: Tensor,
    destination: tuple[Tensor, Tensor],
    vocab: int,
) -> None:
    if len(aux_N):
        with torch.cuda.device_of(aux_N):
            fused.loss_grad_kernel[(len(aux_N),)](
                *(*draft.pointers, *target.pointers, *draft.stats, *target.stats),
                *(aux_N, scale_N, *destination, vocab),
                KIND=KIND[name],
                **LAUNCH,
            )


def _hard_value(draft: Rows, label_N: Tensor, vocab: int) -> Tensor:
    value_N = torch.empty_like(draft.max_N)
    if len(value_N):
        with torch.cuda.device_of(value_N):
            fused.hard_value_kernel[(len(value_N),)](
                *draft.pointers, *draft.stats, label_N, value_N, vocab, num_warps=1
            )
    return value_N


def _hard_grad(
    draft: Rows,
    label_N: Tensor,
    scale_N: Tensor,
    destination: tuple[Tensor, Tensor],
    vocab: int,
) -> None:
    if len(label_N):
        with torch.cuda.device_of(label_N):
            fused.hard_grad_kernel[(len(label_N),)](
                *(*draft.pointers, *draft.stats, label_N, scale_N, *destination, vocab), **LAUNCH
            )


def _check_runnable(data: Tensor) -> None:
    if data.dtype == torch.float64:
        raise ValueError("the Triton kernels sum in fp32: use impl='chunked' for float64 logits")
    compiled = not type(fused.softmax_stats_kernel).__name__.startswith("Interpreted")
    if compiled and not data.is_cuda:
        raise ValueError(
            f"impl='triton' needs a GPU tensor, got one on {data.device}: use impl='chunked'"
        )
