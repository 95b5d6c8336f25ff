"""Public losses on hidden states, fused with the output projection.

Shape suffixes: G draft depths, T rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from types import ModuleType
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from bebop_kernels.dispatch import Impl, pick
from bebop_kernels.tv_loss import chunked, linear, reference
from bebop_kernels.tv_loss.chain import Denominator, valid_depths
from bebop_kernels.tv_loss.on_logits import check_labels
from bebop_kernels.tv_loss.parallel import Group


class LinearOptions(TypedDict, total=False):
    """Options that every loss on hidden states takes, all by keyword.

    denominator: what the sum over rows is divided by; default the number of rows whose first
        depth is valid. Give the global count to make micro-batches and ranks add up.
    temperature: both sides' logits are divided by it; default 1.
    vocab_size: number of real entries; rows of the weights beyond it are padding. Default all.
    target_weight: [V, H'] when the target has its own projection; detached. Default `weight`.
    chunk: rows of the sequence per chunk; default by a memory budget.
    group: process group over which V is split in rank order: both weights are this rank's rows.
        Losses and `draft_hidden`'s gradient are complete on every rank, the weight's gradient is
        of this rank's rows. Every rank passes the same hidden states and mask.
    impl: "reference", "chunked", "triton", or None for the device's own.
    """

    denominator: Denominator
    temperature: float
    vocab_size: int | None
    target_weight: Tensor | None
    chunk: int | None
    group: Group
    impl: Impl | None


def linear_e2e_tv_loss(
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    mask: Tensor,
    **options: Unpack[LinearOptions],
) -> tuple[Tensor, Tensor]:
    """`e2e_tv_loss` of `draft_hidden @ weight.T` and `target_hidden @ target_weight.T`.

    Equation 13 of arXiv 2606.12370; no tensor of size T x V exists at any time.

    Args:
        draft_hidden: [G, T, H]; receives the gradient.
        target_hidden: [T + G, H], where depth i (from 1) of row t is judged by row t + i, or
            [G, T, H], one row a pair; detached.
        weight: [V, H]; receives a gradient (from the draft's logits alone) if it requires one.
        mask: [G, T], bool or 0/1. A depth outside the mask ends its row's chain, and costs no
            work.
        **options: see `LinearOptions`.

    Returns:
        (loss, alpha): a scalar, 0 without valid rows, and detached [G, T], 0 where not valid.

    Raises:
        ValueError: shapes do not fit, or an option is out of range.
    """
    return _linear("e2e_tv", draft_hidden, target_hidden, weight, mask, None, **options)


def linear_tv_loss(
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    mask: Tensor,
    **options: Unpack[LinearOptions],
) -> tuple[Tensor, Tensor]:
    """(loss, d_TV [G, T]): each row's mean of eq. 10 over its valid depths.

    Arguments and rules as in `linear_e2e_tv_loss`; the second result is detached, 0 where not
    valid.
    """
    return _linear("tv", draft_hidden, target_hidden, weight, mask, None, **options)


def linear_kl_loss(
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    mask: Tensor,
    **options: Unpack[LinearOptions],
) -> tuple[Tensor, Tensor]:
    """(loss, KL(p || q) [G, T] in nats), averaged as `linear_tv_loss` is."""
    return _linear("kl", draft_hidden, target_hidden, weight, mask, None, **options)


def linear_rkl_loss(
    draft_hidden: Tensor,
    target_hidden: Tensor,
    weight: Tensor,
    mask: Tensor,
    **options: Unpack[LinearOptions],
) -> tuple[Tensor, Tensor]:
    """(loss, KL(q || p) [G, T] in nats), averaged as `linear_tv_loss` is."""
    return _linear("rkl", draft_hidden, target_hidden, weight, mask, None, **options)


def linear_ce_loss(
    draft_hidden: Tensor,
    target_hidden: Tensor | None,
    weight: Tensor,
    mask: Tensor,
    labels: Tensor | None = None,
    **options: Unpack[LinearOptions],
) -> tuple[Tensor, Tensor]:
    """(loss, cross-entropy [G, T] in nats), averaged as `linear_tv_loss` is.

    With `labels` ([G, T] int64 over the whole vocabulary, anything where masked) it is
    `-log q(y)` and `target_hidden` may be None; without, it is `-sum p log q`.
    """
    if labels is None and target_hidden is None:
        raise ValueError("linear_ce_loss needs labels or target_hidden")
    target = target_hidden if labels is None else None
    return _linear("ce", draft_hidden, target, weight, mask, labels, **options)


def _linear(
    name: str,
    draft_hidden: Tensor,
    target_hidden: Tensor | None,
    weight: Tensor,
    mask: Tensor,
    labels: Tensor | None,
    *,
    denominator: Denominator = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    target_weight: Tensor | None = None,
    chunk: int | None = None,
    group: Group = None,
    impl: Impl | None = None,
) -> tuple[Tensor, Tensor]:
    target_weight = weight.detach() if target_weight is None else target_weight.detach()
    _check_shapes(draft_hidden, target_hidden, weight, target_weight, mask)
    _check_options(temperature, vocab_size, chunk, weight, group)
    if labels is not None:
        total = weight.shape[0] * (1 if group is None else group.size())
        check_labels(labels, mask.shape, vocab_size or total, valid_depths(mask))
    if target_hidden is not None:
        target_hidden = target_hidden.detach()
    form = pick(impl, draft_hidden)
    if form == "reference":
        if group is not None:
            raise ValueError("the reference holds the whole vocabulary: group must be None")
        return reference.linear_loss(
            name,
            draft_hidden,
            target_hidden,
            weight[:vocab_size],
            target_weight[:vocab_size],
            mask,
            labels,
            denominator,
            temperature,
        )
    options = linear.Options(
        name=name,
        temperature=temperature,
        denominator=denominator,
        vocab_size=vocab_size,
        chunk=chunk,
        group=group,
        backend=chunked if form == "chunked" else _launch(),
        grad=torch.is_grad_enabled(),
    )
    return linear.linear_loss(
        draft_hidden, weight, target_hidden, target_weight, mask, labels, options
    )


def _launch() -> ModuleType:
    from bebop_kernels.tv_loss import launch  # loads Triton, which a CPU may lack

    return launch


def _check_shapes(
    draft: Tensor, target: Tensor | None, weight: Tensor, target_weight: Tensor, mask: Tensor
) -> None:
    if draft.dim() != 3 or weight.dim() != 2 or draft.shape[2] != weight.shape[1]:
        raise ValueError(
            f"draft_hidden must be [G, T, H] and weight [V, H], got {tuple(draft.shape)} "
            f"and {tuple(weight.shape)}"
        )
    depths, rows, _ = draft.shape
    if mask.shape != (depths, rows):
        raise ValueError(f"mask must be [G, T] = [{depths}, {rows}], got {tuple(mask.shape)}")
    if target_weight.dim() != 2 or target_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"target_weight must have weight's {weight.shape[0]} rows, got "
            f"{tuple(target_weight.shape)}: pad the shorter one and set vocab_size"
        )
    hidden = target_weight.shape[1]
    allowed = ((rows + depths, hidden), (depths, rows, hidden))
    if target is not None and tuple(target.shape) not in allowed:
        raise ValueError(
            f"target_hidden must be [T + G, H] = {list(allowed[0])} or [G, T, H] = "
            f"{list(allowed[1])}, got {list(target.shape)}"
        )


def _check_options(
    temperature: float, vocab_size: int | None, chunk: int | None, weight: Tensor, group: Group
) -> None:
    total = weight.shape[0] * (1 if group is None else group.size())
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if vocab_size is not None and not 0 < vocab_size <= total:
        raise ValueError(f"vocab_size must lie in (0, {total}], got {vocab_size}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 row, got {chunk}")
