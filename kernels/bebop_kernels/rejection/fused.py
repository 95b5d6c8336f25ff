"""Triton chain verification: one program a request, acceptance and residual draw in one launch.

The walk reads two numbers a depth. The draw reads one row of p and q three times: the residual's
mass, the block where the cumulative sum passes `u Z`, and that block again for the entry. No
[B, V] tensor is written.

Shape suffixes: B requests, G draft depths, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_V = 2048


@triton.jit
def _weights(p_ptr, q_ptr, column, V, q_limit):
    """Block of max(0, p - q), where q counts below `q_limit`: V, or 0 for p itself."""
    p = tl.load(p_ptr + column, mask=column < V, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + column, mask=column < q_limit, other=0.0).to(tl.float32)
    return tl.maximum(p - q, 0.0)


@triton.jit
def verify_chain_kernel(
    token_ptr,
    q_ptr,
    p_ptr,
    uniform_ptr,
    gumbel_ptr,
    num_accepted_ptr,
    out_ptr,
    V,
    DEPTHS: tl.constexpr,
    GUMBEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    token_ptr += request * DEPTHS
    q_ptr += request * DEPTHS * V
    p_ptr += request * (DEPTHS + 1) * V
    uniform_ptr += request * (DEPTHS + 1)
    out_ptr += request * (DEPTHS + 1)

    accepted = tl.zeros((), tl.int64)
    for depth in range(DEPTHS):
        if accepted == depth:
            token = tl.load(token_ptr + depth)
            q = tl.load(q_ptr + depth * V + token).to(tl.float64)
            p = tl.load(p_ptr + depth * V + token).to(tl.float64)
            if tl.load(uniform_ptr + depth).to(tl.float64) * q < p:
                tl.store(out_ptr + depth, token)
                accepted += 1

    q_limit = tl.where(accepted < DEPTHS, V, 0)
    q_ptr += tl.minimum(accepted, DEPTHS - 1) * V
    p_ptr += accepted * V
    mass = tl.zeros((), tl.float64)
    for start in range(0, V, BLOCK):
        w = _weights(p_ptr, q_ptr, start + tl.arange(0, BLOCK), V, q_limit)
        mass += tl.sum(w.to(tl.float64), axis=0)
    if mass <= 0:  # p equals q: nothing is left over, and the law is p
        q_limit = tl.zeros((), tl.int32)
        for start in range(0, V, BLOCK):
            w = _weights(p_ptr, q_ptr, start + tl.arange(0, BLOCK), V, q_limit)
            mass += tl.sum(w.to(tl.float64), axis=0)

    last = tl.zeros((), tl.int64)
    if GUMBEL:
        gumbel_ptr += request * V
        best = tl.full((), float("-inf"), tl.float32)
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            w = _weights(p_ptr, q_ptr, column, V, q_limit)
            noise = tl.load(gumbel_ptr + column, mask=column < V, other=0.0)
            score = tl.where(w > 0, tl.log(tl.where(w > 0, w, 1.0)) + noise, float("-inf"))
            top = tl.max(score, axis=0)
            if top > best:
                best = top
                last = start + tl.argmax(score, axis=0).to(tl.int64)
    else:
        threshold = tl.load(uniform_ptr + DEPTHS).to(tl.float64) * mass
        before = tl.zeros((), tl.float64)
        chosen = tl.zeros((), tl.int1)
        for start in range(0, V, BLOCK):
            if not chosen:
                lane = tl.arange(0, BLOCK)
                w = _weights(p_ptr, q_ptr, start + lane, V, q_limit).to(tl.float64)
                until = before + tl.cumsum(w, axis=0)
                hit = (until > threshold) & (w > 0)
                first = tl.min(tl.where(hit, lane, BLOCK), axis=0)
                # If rounding leaves no entry beyond u Z, the last positive one so far stands.
                positive = tl.max(tl.where(w > 0, lane, -1), axis=0)
                place = tl.where(first < BLOCK, first, positive)
                if place >= 0:
                    last = (start + place).to(tl.int64)
                chosen = first < BLOCK
                before += tl.sum(w, axis=0)

    tl.store(num_accepted_ptr + request, accepted)
    for depth in range(DEPTHS + 1):
        if depth == accepted:
            tl.store(out_ptr + depth, last)
        if depth > accepted:
            tl.store(out_ptr + depth, tl.full((), -1, tl.int64))


def verify_chain(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    uniforms: Tensor,
    gumbel: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of each chain and emit one more token."""
    compiled = not type(verify_chain_kernel).__name__.startswith("Interpreted")
    if compiled and not draft_tokens.is_cuda:
        raise ValueError(
            f"impl='triton' needs a GPU tensor, got one on {draft_tokens.device}: "
            f"use impl='chunked'"
        )
    batch, depths = draft_tokens.shape
    num_accepted_B = draft_tokens.new_empty(batch)
    tokens_BG = draft_tokens.new_empty(batch, depths + 1)
    # Without drafts there is no q row to point at; p stands in and is never subtracted.
    q = draft_probs if depths else target_probs
    if batch:
        with torch.cuda.device_of(draft_tokens):
            verify_chain_kernel[(batch,)](
                draft_tokens.contiguous(),
                q.contiguous(),
                target_probs.contiguous(),
                uniforms.contiguous(),
                uniforms if gumbel is None else gumbel.float().contiguous(),
                num_accepted_B,
                tokens_BG,
                target_probs.shape[-1],
                DEPTHS=depths,
                GUMBEL=gumbel is not None,
                BLOCK=BLOCK_V,
                num_warps=8,
            )
    return num_accepted_B, tokens_BG
