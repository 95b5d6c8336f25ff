"""Public losses on logits: checks, then the form that `impl` or the device picks.

Shape suffixes: G draft depths, T rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bebop_kernels.dispatch import Impl, pick
from bebop_kernels.tv_loss import logits, reference
from bebop_kernels.tv_loss.chain import Denominator, chain_loss, valid_depths


def tv_loss(draft_logits: Tensor, target_logits: Tensor, *, impl: Impl | None = None) -> Tensor:
    """Total variation `d_TV(p, q) = 1/2 sum |p - q|` per position (arXiv 2606.12370 eq. 10).

    `1 - tv_loss` is the acceptance rate of rejection sampling (eq. 2).

    Args:
        draft_logits: [..., V], any float dtype; receives the gradient
            `q_j (g_j - sum_v q_v g_v)`, `g = 1/2 sign(q - p)`, `sign(0) = 0` at ties (eq. 11).
        target_logits: [..., V], same shape; detached.
        impl: "reference", "chunked", "triton", or None for the device's own.

    Returns:
        [...] in [0, 1], fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: shapes differ, V is 0, or the form cannot run on this tensor.
    """
    return _per_position("tv", draft_logits, target_logits, impl)


def kl_loss(draft_logits: Tensor, target_logits: Tensor, *, impl: Impl | None = None) -> Tensor:
    """`KL(p || q)` per position, nats; as `tv_loss`, with gradient `q - p`."""
    return _per_position("kl", draft_logits, target_logits, impl)


def rkl_loss(draft_logits: Tensor, target_logits: Tensor, *, impl: Impl | None = None) -> Tensor:
    """`KL(q || p)` per position, nats; as `tv_loss`, gradient `q_j (log(q_j/p_j) - RKL)`.

    Infinite, with a NaN gradient, where p is 0 (a -inf logit) and q is not.
    """
    return _per_position("rkl", draft_logits, target_logits, impl)


def ce_loss(draft_logits: Tensor, labels: Tensor, *, impl: Impl | None = None) -> Tensor:
    """`-log q(y)` per position, nats: [..., V] logits and [...] int64 labels in [0, V)."""
    check_labels(labels, draft_logits.shape[:-1], draft_logits.shape[-1])
    if pick(impl, draft_logits) == "reference":
        return reference.ce_loss(draft_logits, labels)
    shape = draft_logits.shape[:-1]
    draft_GTV, label_GT = _as_depths(draft_logits), labels.reshape(_grid(shape))
    everything_GT = torch.ones_like(label_GT, dtype=torch.bool)
    return _run("ce", draft_GTV, None, label_GT, everything_GT, impl).reshape(shape)


def e2e_tv_loss(
    draft_logits: Tensor,
    target_logits: Tensor,
    mask: Tensor,
    denominator: Denominator = None,
    *,
    impl: Impl | None = None,
) -> tuple[Tensor, Tensor]:
    """End-to-end total variation of a chain of drafts (arXiv 2606.12370 eq. 13).

    A row whose first n depths are valid costs `1 - (1/n) sum_{j<=n} prod_{i<=j} alpha_i`,
    `alpha_i = 1 - d_TV(p_i, q_i)`: one minus the expected accepted share of its drafts. A row
    with n = 0 costs 0.

    Args:
        draft_logits: [G, T, V]; receives the gradient, depth by depth.
        target_logits: [G, T, V]: what the backbone says where depth i of row t is verified, that
            is at row t + i; may be overlapping views of one buffer; detached.
        mask: [G, T], bool or 0/1. A depth outside the mask ends its row's chain.
        denominator: what the sum over rows is divided by; default the number of rows whose first
            depth is valid. Give the global count to make micro-batches and ranks add up; 0 (no
            row anywhere) counts as 1.
        impl: "reference", "chunked", "triton", or None for the device's own.

    Returns:
        (loss, alpha): a scalar, 0 without valid rows, and detached [G, T], 0 where not valid.

    Raises:
        ValueError: shapes do not fit, or the denominator is negative.
    """
    check_pair(draft_logits, target_logits)
    if draft_logits.dim() != 3 or mask.shape != draft_logits.shape[:2]:
        raise ValueError(
            f"logits must be [G, T, V] and mask [G, T], got {tuple(draft_logits.shape)} "
            f"and {tuple(mask.shape)}"
        )
    if pick(impl, draft_logits) == "reference":
        return reference.e2e_tv_loss(draft_logits, target_logits, mask, denominator)
    valid_GT = valid_depths(mask)
    tv_GT = _run("tv", draft_logits, target_logits.detach(), None, valid_GT, impl)
    alpha_GT = torch.where(valid_GT, 1 - tv_GT, 0.0)
    return chain_loss(alpha_GT, valid_GT, denominator), alpha_GT.detach()


def check_pair(draft: Tensor, target: Tensor) -> None:
    """Refuse logits that cannot be compared entry by entry."""
    if draft.shape != target.shape or draft.dim() < 1 or draft.shape[-1] == 0:
        raise ValueError(
            f"draft and target logits must have one shape [..., V] with V > 0, got "
            f"{tuple(draft.shape)} and {tuple(target.shape)}: pad the shorter vocabulary with -inf"
        )


def check_labels(
    labels: Tensor, shape: torch.Size, vocab: int, valid: Tensor | None = None
) -> None:
    """Refuse labels that would read outside the vocabulary."""
    if labels.shape != shape or labels.dtype != torch.int64:
        raise ValueError(
            f"labels must be int64 {tuple(shape)}, got {labels.dtype} {tuple(labels.shape)}"
        )
    used = labels if valid is None else labels[valid]
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < vocab:
        raise ValueError(
            f"labels must lie in [0, {vocab}), got {int(used.min())} to {int(used.max())}: "
            f"mask the positions that have none"
        )


def _per_position(name: str, draft: Tensor, target: Tensor, impl: Impl | None) -> Tensor:
    check_pair(draft, target)
    if pick(impl, draft) == "reference":
        return getattr(reference, f"{name}_loss")(draft, target)
    shape = draft.shape[:-1]
    everything_GT = torch.ones(_grid(shape), dtype=torch.bool, device=draft.device)
    target_GTV = _as_depths(target.detach())
    return _run(name, _as_depths(draft), target_GTV, None, everything_GT, impl).reshape(shape)


def _run(
    name: str,
    draft_GTV: Tensor,
    target_GTV: Tensor | None,
    label_GT: Tensor | None,
    valid_GT: Tensor,
    impl: Impl | None,
) -> Tensor:
    if pick(impl, draft_GTV) == "chunked":
        return logits.logits_loss(name, draft_GTV, target_GTV, label_GT, valid_GT)
    from bebop_kernels.tv_loss import launch  # loads Triton, which a CPU may lack

    return launch.logits_loss(name, draft_GTV, target_GTV, label_GT, valid_GT)


def _grid(shape: torch.Size) -> tuple[int, int]:
    """The leading shape as (G, T): kept when it is one, flattened to one depth otherwise."""
    return (shape[0], shape[1]) if len(shape) == 2 else (1, shape.numel())


def _as_depths(x: Tensor) -> Tensor:
    return x.reshape(*_grid(x.shape[:-1]), x.shape[-1])
