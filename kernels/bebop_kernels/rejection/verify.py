"""The public verifier: checks, then the form that `impl` or the device picks.

Shape suffixes: B requests, G draft depths, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bebop_kernels.dispatch import Impl, pick
from bebop_kernels.rejection import chunked, reference

ROW_SUM_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


def verify_chain(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    uniforms: Tensor,
    *,
    gumbel: Tensor | None = None,
    check: bool = True,
    impl: Impl | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of each request's drafts and emit one more token, losslessly.

    Draft `y_i` is accepted iff `u_i q_i(y_i) < p_i(y_i)` (arXiv 2606.12370 eq. 2); at the first
    rejection n the extra token follows `max(0, p_n - q_n)`, renormalised; when all G drafts are
    accepted it follows the last target row, `p_{G+1}`. The emitted tokens are then distributed
    exactly as if the target had sampled them. A one-hot q gives target-only verification.

    Args:
        draft_tokens: [B, G] int64, sampled from `draft_probs`.
        draft_probs: [B, G, V], the very tensor the drafts were sampled from: same dtype,
            temperature, filters (top-k and top-p zeros are fine).
        target_probs: [B, G+1, V]; row i is the target where draft i is judged.
        uniforms: [B, G+1] in [0, 1): G acceptance tests, then the extra token's draw. Streams
            must be independent of each other and of the drafts'.
        gumbel: [B, V] standard Gumbel noise: the extra token is then
            `argmax(log residual + gumbel)` and `uniforms[:, G]` goes unused.
        check: refuse rows that do not sum to 1 and tokens outside the vocabulary. Costs one read
            of the probabilities, and on a GPU a wait for it.
        impl: "reference", "chunked", "triton", or None for the device's own.

    Returns:
        (num_accepted [B] int64, tokens [B, G+1] int64): accepted drafts, the extra token, then
        -1. The CDF is inverted with the strict `cumsum > u Z`: a token of probability 0 is never
        emitted, not even at u = 0.

    Raises:
        ValueError: shapes do not fit, or `check` found rows or tokens that cannot be right.
    """
    form = pick(impl, draft_tokens)
    _check_shapes(draft_tokens, draft_probs, target_probs, uniforms, gumbel)
    if check:
        _check_values(draft_tokens, draft_probs, target_probs)
    arguments = (draft_tokens, draft_probs, target_probs, uniforms, gumbel)
    if form == "reference":
        return reference.verify_chain(*arguments)
    if form == "chunked":
        return chunked.verify_chain(*arguments)
    from bebop_kernels.rejection import fused  # loads Triton, which a CPU may lack

    return fused.verify_chain(*arguments)


def _check_shapes(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    uniforms: Tensor,
    gumbel: Tensor | None,
) -> None:
    if draft_tokens.dim() != 2 or draft_tokens.dtype != torch.int64:
        raise ValueError(
            f"draft_tokens must be int64 [B, G], got {draft_tokens.dtype} "
            f"{list(draft_tokens.shape)}"
        )
    batch, depths = draft_tokens.shape
    vocab = target_probs.shape[-1]
    expected = [
        ("draft_probs", draft_probs, (batch, depths, vocab)),
        ("target_probs", target_probs, (batch, depths + 1, vocab)),
        ("uniforms", uniforms, (batch, depths + 1)),
    ]
    if gumbel is not None:
        expected.append(("gumbel", gumbel, (batch, vocab)))
    for name, tensor, shape in expected:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")


def _check_values(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor) -> None:
    """Zeroed or unnormalised rows would only show as a wrong acceptance rate."""
    vocab = target_probs.shape[-1]
    if draft_tokens.numel() and not 0 <= int(draft_tokens.min()) <= int(draft_tokens.max()) < vocab:
        raise ValueError(
            f"draft_tokens must lie in [0, {vocab}), got {int(draft_tokens.min())} to "
            f"{int(draft_tokens.max())}"
        )
    for name, probs in (("draft_probs", draft_probs), ("target_probs", target_probs)):
        if not probs.numel():
            continue
        error_BG = (probs.sum(dim=-1, dtype=torch.float32) - 1).abs()
        worst = float(error_BG.max())
        if not worst <= ROW_SUM_TOLERANCE.get(probs.dtype, 1e-3):
            request, row = divmod(int(error_BG.nan_to_num(nan=9e9).argmax()), probs.shape[1])
            raise ValueError(
                f"{name} row [{request}, {row}] does not sum to 1 (off by {worst:.3g}): pass the "
                f"normalised probabilities that were sampled from"
            )
