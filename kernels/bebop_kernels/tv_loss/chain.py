"""How per-depth values become one number: the arithmetic on [G, T] that every form shares.

Shape suffixes: G draft depths, T rows (positions of the sequence).
"""

from __future__ import annotations

import torch
from torch import Tensor

Denominator = float | int | Tensor | None


def valid_depths(mask_GT: Tensor) -> Tensor:
    """Boolean [G, T]: True at depth i of row t when depths 1..i are all in the mask.

    A depth that is not valid ends the chain: what was drafted after it cannot be accepted.
    """
    return torch.cumprod((mask_GT != 0).to(torch.int32), dim=0).bool()


def resolve_denominator(valid_GT: Tensor, denominator: Denominator, dtype: torch.dtype) -> Tensor:
    """The scalar that the sum over rows is divided by; 0 counts as 1, so that no row gives 0.

    Default: the number of rows whose first depth is valid. Pass the count over the whole
    global batch to make the gradient independent of micro-batches and ranks.
    """
    if denominator is None:
        denominator = valid_GT[0].sum()
    elif not isinstance(denominator, Tensor) and not denominator >= 0:
        raise ValueError(f"denominator must not be negative, got {denominator}")
    scalar = torch.as_tensor(denominator, dtype=dtype, device=valid_GT.device).detach()
    return torch.where(scalar == 0, torch.ones_like(scalar), scalar)


def chain_loss(alpha_GT: Tensor, valid_GT: Tensor, denominator: Denominator = None) -> Tensor:
    """Scalar end-to-end loss (arXiv 2606.12370 eq. 13), summed over rows / denominator.

    A row with n valid depths costs `1 - (1/n) sum_{j<=n} prod_{i<=j} alpha_i`; a row with none
    costs 0. Differentiable with respect to `alpha_GT`; no division by alpha, which may be 0.
    """
    prefix_T = torch.ones_like(alpha_GT[0])
    expected_T = torch.zeros_like(alpha_GT[0])
    for alpha_T, valid_T in zip(alpha_GT, valid_GT, strict=True):
        prefix_T = torch.where(valid_T, prefix_T * alpha_T, 0.0)
        expected_T = expected_T + prefix_T
    depths_T = valid_GT.sum(dim=0)
    row_T = torch.where(depths_T > 0, 1 - expected_T / depths_T.clamp(min=1), 0.0)
    return row_T.sum() / resolve_denominator(valid_GT, denominator, alpha_GT.dtype)


def mean_loss(value_GT: Tensor, valid_GT: Tensor, denominator: Denominator = None) -> Tensor:
    """Scalar: each row's mean over its valid depths, summed over rows / denominator."""
    depths_T = valid_GT.sum(dim=0).clamp(min=1)
    row_T = torch.where(valid_GT, value_GT, 0.0).sum(dim=0) / depths_T
    return row_T.sum() / resolve_denominator(valid_GT, denominator, value_GT.dtype)


def chain_weights(alpha_GT: Tensor, valid_GT: Tensor) -> Tensor:
    """[G, T] derivative of a row's end-to-end loss with respect to its d_TV at depth i.

    `w_i = (1/n) (prod_{k<i} alpha_k) (1 + sum_{m>i} prod_{i<k<=m} alpha_k)`, by one sweep forward
    (prefix products) and one backward (Horner), because dividing by alpha_i fails at 0.
    """
    alpha_GT = torch.where(valid_GT, alpha_GT, 0.0)
    prefix_GT = torch.ones_like(alpha_GT)
    suffix_GT = torch.ones_like(alpha_GT)
    for i in range(1, len(alpha_GT)):
        prefix_GT[i] = prefix_GT[i - 1] * alpha_GT[i - 1]
        suffix_GT[-1 - i] = 1 + alpha_GT[-i] * suffix_GT[-i]
    return mean_weights(valid_GT, alpha_GT.dtype) * prefix_GT * suffix_GT


def mean_weights(valid_GT: Tensor, dtype: torch.dtype) -> Tensor:
    """[G, T] derivative of a row's mean with respect to its value at depth i: 1/n or 0."""
    return valid_GT.to(dtype) / valid_GT.sum(dim=0).clamp(min=1)
