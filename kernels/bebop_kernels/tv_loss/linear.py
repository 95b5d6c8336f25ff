"""The losses fused with the output projection: no [T, V] tensor is ever held.

For each chunk of rows: project the draft's rows of every depth and the target rows that they
share, turn the draft's logits into `d value / d z` in place, and contract that with the weight.
What survives the chunk is [G, T]-sized values and [G, T, H]-sized gradients. All depths of a row
are in one chunk, so the weights of the end-to-end chain are known before the weight's gradient
is summed; the hidden states' gradient is stored without them and weighted in backward.

Shape suffixes: G draft depths, T rows, H hidden, V vocabulary (this rank's part), N valid pairs
of a chunk, M target rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bebop_kernels.tv_loss import chain, plan
from bebop_kernels.tv_loss.parallel import Group, all_sum, local_vocabulary
from bebop_kernels.tv_loss.reference import accumulation_dtype

TILE_V = 4096


@dataclass(frozen=True)
class Options:
    """What a fused-linear loss is asked for, apart from its tensors."""

    name: str
    temperature: float
    denominator: chain.Denominator
    vocab_size: int | None
    chunk: int | None
    group: Group
    backend: ModuleType  # chunked or launch: soft_loss_ and hard_loss_
    grad: bool


def linear_loss(
    draft_hidden: Tensor,
    weight: Tensor,
    target_hidden: Tensor | None,
    target_weight: Tensor,
    mask: Tensor,
    labels: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """(scalar loss, value [G, T]); value is alpha for "e2e_tv", the loss per position else."""
    return _LinearLoss.apply(
        draft_hidden, weight, target_hidden, target_weight.detach(), mask, labels, options
    )


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        draft_hidden: Tensor,
        weight: Tensor,
        target_hidden: Tensor | None,
        target_weight: Tensor,
        mask: Tensor,
        labels: Tensor | None,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        need_hidden, need_weight = (options.grad and need for need in ctx.needs_input_grad[:2])
        sweep = _Sweep(draft_hidden, weight, target_hidden, target_weight, mask, labels, options)
        sweep.run(need_hidden, need_weight)
        ctx.save_for_backward(sweep.grad_hidden, sweep.grad_weight, sweep.row_weights())
        ctx.dtypes = draft_hidden.dtype, weight.dtype
        value_GT = sweep.value_GT
        ctx.mark_non_differentiable(value_GT)
        return sweep.loss(), value_GT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, weights_GT = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * (weights_GT * upstream).unsqueeze(-1)).to(hidden_dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * upstream).to(weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


class _Sweep:
    """One pass over the chunks, with the two logits buffers it reuses."""

    def __init__(
        self,
        draft_hidden: Tensor,
        weight: Tensor,
        target_hidden: Tensor | None,
        target_weight: Tensor,
        mask: Tensor,
        labels: Tensor | None,
        options: Options,
    ) -> None:
        self.options = options
        self.first_entry, real = local_vocabulary(
            weight.shape[0], options.vocab_size, options.group
        )
        self.weight_VH, self.target_weight_VH = weight[:real], target_weight[:real]
        self.hidden_GTH = draft_hidden
        self.target_hidden = target_hidden
        self.label_P = None if labels is None else labels.reshape(-1) - self.first_entry
        self.padded_vocab = weight.shape[0]
        self.valid_GT = chain.valid_depths(mask)
        self.dtype = accumulation_dtype(draft_hidden.dtype)
        self.value_GT = draft_hidden.new_zeros(self.valid_GT.shape, dtype=self.dtype)
        self.grad_hidden: Tensor | None = None
        self.grad_weight: Tensor | None = None
        self.scale = chain.resolve_denominator(self.valid_GT, options.denominator, self.dtype)

    def run(self, need_hidden: bool, need_weight: bool) -> None:
        depths, rows, hidden = self.hidden_GTH.shape
        if need_hidden:
            self.grad_hidden = self.value_GT.new_zeros(depths, rows, hidden)
        if need_weight:
            self.grad_weight = self.value_GT.new_zeros(self.padded_vocab, hidden)
        vocab = len(self.weight_VH)
        chunk = self.options.chunk or plan.default_chunk(
            self.hidden_GTH.device, depths, rows, vocab, hidden
        )
        chunk = min(chunk, rows) or 1
        halo = self.target_hidden is not None and self.target_hidden.dim() == 2
        draft_buffer = self.value_GT.new_empty(depths * chunk, vocab)
        target_rows = 0 if self.target_hidden is None else depths * chunk
        target_rows = chunk + depths - 1 if halo else target_rows
        target_buffer = self.value_GT.new_empty(target_rows, vocab)
        for piece in plan.pieces(self.valid_GT, chunk, halo=halo):
            self._chunk(piece, draft_buffer, target_buffer)
        if self.grad_hidden is not None:
            all_sum(self.grad_hidden, self.options.group)

    def _chunk(self, piece: plan.Piece, draft_buffer: Tensor, target_buffer: Tensor) -> None:
        draft_NH = self.hidden_GTH.reshape(-1, self.hidden_GTH.shape[-1])[piece.pair_N]
        draft_NV = draft_buffer[: len(draft_NH)]
        self._project(draft_NH, self.weight_VH, draft_NV)
        value_N = self._values(piece, draft_NV, target_buffer)
        self.value_GT.view(-1)[piece.pair_N] = value_N
        if self.grad_hidden is not None:
            grad_NH = contract(draft_NV, self.weight_VH).div_(self.options.temperature)
            self.grad_hidden.view(-1, grad_NH.shape[1])[piece.pair_N] = grad_NH
        if self.grad_weight is not None:
            draft_NV.mul_(self._pair_weights(piece).unsqueeze(-1))
            total_VH = self.grad_weight[: len(self.weight_VH)]
            accumulate_weight_(total_VH, draft_NV, draft_NH, 1 / self.options.temperature)

    def _values(self, piece: plan.Piece, draft_NV: Tensor, target_buffer: Tensor) -> Tensor:
        """The chunk's values [N] (alpha for the chain); `draft_NV` becomes their gradient."""
        options = self.options
        grad = self.grad_hidden is not None or self.grad_weight is not None
        if self.label_P is not None:
            label_N = self.label_P[piece.pair_N]
            return options.backend.hard_loss_(draft_NV, label_N, options.group, grad)
        assert self.target_hidden is not None
        hidden = self.target_hidden
        target_MV = target_buffer[: len(piece.target_M)]
        target_MH = hidden.reshape(-1, hidden.shape[-1])[piece.target_M]
        self._project(target_MH, self.target_weight_VH, target_MV)
        value_N = options.backend.soft_loss_(
            options.name, draft_NV, target_MV, piece.target_of_N, options.group, grad
        )
        return 1 - value_N if options.name == "e2e_tv" else value_N

    def _project(self, hidden_NH: Tensor, weight_VH: Tensor, out_NV: Tensor) -> None:
        if hidden_NH.dtype == out_NV.dtype:
            project(hidden_NH / self.options.temperature, weight_VH, out_NV)
        else:
            project(hidden_NH, weight_VH, out_NV)
            out_NV.div_(self.options.temperature)

    def _weights(self, value_GT: Tensor, valid_GT: Tensor) -> Tensor:
        """[G, T] derivative of the loss with respect to each position's own loss."""
        if self.options.name == "e2e_tv":
            return chain.chain_weights(value_GT, valid_GT) / self.scale
        return chain.mean_weights(valid_GT, self.dtype) / self.scale

    def _pair_weights(self, piece: plan.Piece) -> Tensor:
        rows = slice(piece.first, piece.last)
        weights_GC = self._weights(self.value_GT[:, rows], self.valid_GT[:, rows])
        total = self.valid_GT.shape[1]
        depth_N, row_N = piece.pair_N // total, piece.pair_N % total - piece.first
        return weights_GC[depth_N, row_N]

    def row_weights(self) -> Tensor:
        return self._weights(self.value_GT, self.valid_GT)

    def loss(self) -> Tensor:
        combine = chain.chain_loss if self.options.name == "e2e_tv" else chain.mean_loss
        return combine(self.value_GT, self.valid_GT, self.scale)


def project(hidden_NH: Tensor, weight_VH: Tensor, out_NV: Tensor) -> None:
    """`hidden @ weight.T` into an fp32 (fp64) buffer: low-precision inputs, exact products.

    Logits rounded to bf16 cost several per cent of the gradient.
    """
    if hidden_NH.dtype == weight_VH.dtype == out_NV.dtype:
        torch.mm(hidden_NH, weight_VH.T, out=out_NV)
    elif hidden_NH.is_cuda and hidden_NH.dtype == weight_VH.dtype:
        torch.mm(hidden_NH, weight_VH.T, out_dtype=out_NV.dtype, out=out_NV)
    else:
        hidden_NH = hidden_NH.to(out_NV.dtype)
        for tile in _tiles(weight_VH):
            out_NV[:, tile] = hidden_NH @ weight_VH[tile].to(out_NV.dtype).T


def contract(grad_NV: Tensor, weight_VH: Tensor) -> Tensor:
    """`grad @ weight` [N, H], summed in the buffer's dtype."""
    if grad_NV.dtype == weight_VH.dtype:
        return grad_NV @ weight_VH
    if grad_NV.is_cuda:
        return torch.mm(grad_NV.to(weight_VH.dtype), weight_VH, out_dtype=grad_NV.dtype)
    total_NH = grad_NV.new_zeros(len(grad_NV), weight_VH.shape[1])
    for tile in _tiles(weight_VH):
        total_NH.addmm_(grad_NV[:, tile], weight_VH[tile].to(grad_NV.dtype))
    return total_NH


def accumulate_weight_(total_VH: Tensor, grad_NV: Tensor, hidden_NH: Tensor, scale: float) -> None:
    """`total += scale grad.T @ hidden`, summed in the total's dtype."""
    if hidden_NH.is_cuda and hidden_NH.dtype != total_VH.dtype:
        grad_VN = grad_NV.T.to(hidden_NH.dtype)
        total_VH.add_(torch.mm(grad_VN, hidden_NH, out_dtype=total_VH.dtype), alpha=scale)
    else:
        total_VH.addmm_(grad_NV.T, hidden_NH.to(total_VH.dtype), alpha=scale)


def _tiles(weight_VH: Tensor) -> list[slice]:
    return [slice(first, first + TILE_V) for first in range(0, len(weight_VH), TILE_V)]
