"""Triton kernels of the losses, one program a row of logits.

Three kernels, each a loop over the vocabulary in blocks; between them only [N] vectors live:

    softmax_stats   x           -> max, sum of exponentials            (online, one read)
    loss_stats      z, y, stats -> value, aux (S for tv, RKL for rkl)  (one read of both)
    loss_grad       z, y, stats, aux, scale -> scale x d value / d z   (may overwrite z)

Nothing of size N x V is stored, except the gradient where the caller asks for it. Rows are found
through element offsets, so that windows of one target buffer need no copy. The split between
kernels is where a split vocabulary reduces over ranks.

KIND: 0 total variation, 1 KL, 2 reverse KL, 3 cross-entropy against the target.
Shape suffixes: N rows of draft logits, V vocabulary (local part).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_stats_kernel(x_ptr, offset_ptr, max_ptr, sum_ptr, V, BLOCK: tl.constexpr):
    """max_v x and sum_v exp(x - max), lane by lane and joined once at the end."""
    row = tl.program_id(0)
    x_ptr += tl.load(offset_ptr + row)
    lane_max = tl.full((BLOCK,), float("-inf"), tl.float32)
    lane_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < V, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(lane_max, x)
        # A lane that has seen only -inf keeps sum 0; -inf - -inf would make it NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        lane_sum = lane_sum * tl.exp(lane_max - shift) + tl.exp(x - shift)
        lane_max = new_max
    row_max = tl.max(lane_max, axis=0)
    tl.store(max_ptr + row, row_max)
    tl.store(sum_ptr + row, tl.sum(lane_sum * tl.exp(lane_max - row_max), axis=0))


@triton.jit
def _load_pair(z_ptr, y_ptr, column, V, z_max, z_sum, y_max, y_sum):
    """Block of (log q, q, log p, p)."""
    inside = column < V
    log_q = tl.load(z_ptr + column, mask=inside, other=float("-inf")).to(tl.float32) - z_max
    log_p = tl.load(y_ptr + column, mask=inside, other=float("-inf")).to(tl.float32) - y_max
    q = tl.exp(log_q) / z_sum
    p = tl.exp(log_p) / y_sum
    return log_q - tl.log(z_sum), q, log_p - tl.log(y_sum), p


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def loss_stats_kernel(
    z_ptr,
    z_offset_ptr,
    y_ptr,
    y_offset_ptr,
    z_max_ptr,
    z_sum_ptr,
    y_max_ptr,
    y_sum_ptr,
    value_ptr,
    aux_ptr,
    V,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """This rank's part of a row's value and of the sum its gradient needs."""
    row = tl.program_id(0)
    z_ptr += tl.load(z_offset_ptr + row)
    y_ptr += tl.load(y_offset_ptr + row)
    z_max, z_sum = tl.load(z_max_ptr + row), tl.load(z_sum_ptr + row)
    y_max, y_sum = tl.load(y_max_ptr + row), tl.load(y_sum_ptr + row)
    value = tl.zeros((BLOCK,), tl.float32)
    aux = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        log_q, q, log_p, p = _load_pair(z_ptr, y_ptr, column, V, z_max, z_sum, y_max, y_sum)
        if KIND == 0:
            value += 0.5 * tl.abs(q - p)
            aux += 0.5 * q * _sign(q - p)
        elif KIND == 1:
            value += tl.where(p > 0, p * (log_p - log_q), 0.0)
        elif KIND == 2:
            value += tl.where(q > 0, q * (log_q - log_p), 0.0)
        else:
            value -= tl.where(p > 0, p * log_q, 0.0)
    total = tl.sum(value, axis=0)
    tl.store(value_ptr + row, total)
    tl.store(aux_ptr + row, tl.sum(aux, axis=0) if KIND == 0 else total)


@triton.jit
def loss_grad_kernel(
    z_ptr,
    z_offset_ptr,
    y_ptr,
    y_offset_ptr,
    z_max_ptr,
    z_sum_ptr,
    y_max_ptr,
    y_sum_ptr,
    aux_ptr,
    scale_ptr,
    grad_ptr,
    grad_offset_ptr,
    V,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """scale x d value / d z, written to `grad_ptr`, which may be `z_ptr`."""
    row = tl.program_id(0)
    z_ptr += tl.load(z_offset_ptr + row)
    y_ptr += tl.load(y_offset_ptr + row)
    grad_ptr += tl.load(grad_offset_ptr + row)
    z_max, z_sum = tl.load(z_max_ptr + row), tl.load(z_sum_ptr + row)
    y_max, y_sum = tl.load(y_max_ptr + row), tl.load(y_sum_ptr + row)
    aux, scale = tl.load(aux_ptr + row), tl.load(scale_ptr + row)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        log_q, q, log_p, p = _load_pair(z_ptr, y_ptr, column, V, z_max, z_sum, y_max, y_sum)
        if KIND == 0:
            grad = q * (0.5 * _sign(q - p) - aux)
        elif KIND == 2:
            grad = tl.where(q > 0, q * (log_q - log_p - aux), 0.0)
        else:
            grad = q - p
        tl.store(grad_ptr + column, (scale * grad).to(grad_ptr.dtype.element_ty), mask=column < V)


@triton.jit
def hard_value_kernel(z_ptr, z_offset_ptr, z_max_ptr, z_sum_ptr, label_ptr, value_ptr, V):
    """-log q(y) on the rank that holds the label, 0 on the others."""
    row = tl.program_id(0)
    label = tl.load(label_ptr + row)
    here = (label >= 0) & (label < V)
    z = tl.load(z_ptr + tl.load(z_offset_ptr + row) + label, mask=here, other=0.0).to(tl.float32)
    log_q = z - tl.load(z_max_ptr + row) - tl.log(tl.load(z_sum_ptr + row))
    tl.store(value_ptr + row, tl.where(here, -log_q, 0.0))


@triton.jit
def hard_grad_kernel(
    z_ptr,
    z_offset_ptr,
    z_max_ptr,
    z_sum_ptr,
    label_ptr,
    scale_ptr,
    grad_ptr,
    grad_offset_ptr,
    V,
    BLOCK: tl.constexpr,
):
    """scale x (q - onehot(y)), written to `grad_ptr`, which may be `z_ptr`."""
    row = tl.program_id(0)
    z_ptr += tl.load(z_offset_ptr + row)
    grad_ptr += tl.load(grad_offset_ptr + row)
    z_max, z_sum = tl.load(z_max_ptr + row), tl.load(z_sum_ptr + row)
    label, scale = tl.load(label_ptr + row), tl.load(scale_ptr + row)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + column, mask=column < V, other=float("-inf")).to(tl.float32)
        grad = tl.exp(z - z_max) / z_sum - tl.where(column == label, 1.0, 0.0)
        tl.store(grad_ptr + column, (scale * grad).to(grad_ptr.dtype.element_ty), mask=column < V)
