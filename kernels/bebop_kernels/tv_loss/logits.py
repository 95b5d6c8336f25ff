"""The losses on logits that already exist: nothing is saved but the inputs themselves.

Backward normalises each block again, which costs less than keeping probabilities would.

Shape suffixes: G draft depths, T rows, R rows of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bebop_kernels.tv_loss.chunked import hard_loss_, soft_loss_
from bebop_kernels.tv_loss.reference import accumulation_dtype

BLOCK_ELEMENTS = 2**20


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
    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        draft_GTV: Tensor,
        target_GTV: Tensor | None,
        label_GT: Tensor | None,
        valid_GT: Tensor,
    ) -> Tensor:
        ctx.name = name
        ctx.save_for_backward(draft_GTV, target_GTV, label_GT, valid_GT)
        value_GT = draft_GTV.new_zeros(valid_GT.shape, dtype=accumulation_dtype(draft_GTV.dtype))
        for depth, row_R in _blocks(valid_GT, draft_GTV.shape[-1]):
            inputs = (draft_GTV, target_GTV, label_GT, depth, row_R)
            value_GT[depth, row_R] = _block_loss(name, *inputs, grad=False)[0]
        return value_GT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_GT: Tensor) -> tuple[None, Tensor, None, None, None]:
        draft_GTV, target_GTV, label_GT, valid_GT = ctx.saved_tensors
        grad_GTV = torch.zeros_like(draft_GTV, memory_format=torch.contiguous_format)
        for depth, row_R in _blocks(valid_GT, draft_GTV.shape[-1]):
            inputs = (draft_GTV, target_GTV, label_GT, depth, row_R)
            grad_RV = _block_loss(ctx.name, *inputs, grad=True)[1]
            grad_RV.mul_(upstream_GT[depth, row_R].unsqueeze(-1))
            grad_GTV[depth, row_R] = grad_RV.to(grad_GTV.dtype)
        return None, grad_GTV, None, None, None


def _blocks(valid_GT: Tensor, vocab: int) -> Iterator[tuple[int, Tensor]]:
    rows = max(1, BLOCK_ELEMENTS // vocab)
    for depth, valid_T in enumerate(valid_GT):
        for row_R in valid_T.nonzero().squeeze(-1).split(rows):
            if len(row_R):
                yield depth, row_R


def _block_loss(
    name: str,
    draft_GTV: Tensor,
    target_GTV: Tensor | None,
    label_GT: Tensor | None,
    depth: int,
    row_R: Tensor,
    *,
    grad: bool,
) -> tuple[Tensor, Tensor]:
    """Values [R] and the buffer [R, V] that holds their gradient when `grad`."""
    dtype = accumulation_dtype(draft_GTV.dtype)
    draft_RV = draft_GTV[depth, row_R].to(dtype)
    if label_GT is not None:
        return hard_loss_(draft_RV, label_GT[depth, row_R], None, grad), draft_RV
    assert target_GTV is not None
    target_RV = target_GTV[depth, row_R].to(dtype)
    same_R = torch.arange(len(row_R), device=row_R.device)
    return soft_loss_(name, draft_RV, target_RV, same_R, None, grad), draft_RV
