"""Closed-form start of a head: its fc by ridge regression on cached trunk states.

Shape suffixes: B rows, T tokens, H hidden, N pairs.
"""

import torch
from torch import Tensor

from bebop.errors import InputError
from bebop.models.backbone import Backbone
from bebop.models.mtp_head import MTPHead

_CHUNK = 8192


@torch.no_grad()
def ridge_fit(
    head: MTPHead,
    backbone: Backbone,
    tokens_BT: Tensor,
    hidden_BTH: Tensor,
    mask_BT: Tensor,
    l2: float = 1e-2,
) -> None:
    """Solve the fc, in place, so that depth 1 predicts the trunk's next state.

    A new head's layer is the identity, so its output is `norm(fc z)` with
    `z_t = [norm_e(embed(y_{t+1})), norm_h(h_t)]`, where norm(x) = w * x / rms(x) for the head's
    final gain w. The lm_head should see h_{t+1} = w_b * u_{t+1}, where w_b is the backbone's
    final gain and u has rms 1. So

    1. the fc is the ridge solution of `fc z_t = u_{t+1}`: W = U Zᵀ (Z Zᵀ + λ I)⁻¹;
    2. the norm throws the length of fc z away, and with it the regression's shrinkage: a gain
       per dimension, the least-squares fit of h_{t+1} on `fc z / rms(fc z)`, puts it back.

    Args:
        head: from `new_head` (residual branches zeroed); changed in place.
        tokens_BT: token ids.
        hidden_BTH: trunk states after the final norm.
        mask_BT: nonzero at real tokens; a pair (t, t + 1) counts when both are real.
        l2: λ relative to the mean square of the features.

    Raises:
        InputError: no pair to fit on.
    """
    pairs_BT = mask_BT[:, :-1].bool() & mask_BT[:, 1:].bool()
    if not bool(pairs_BT.any()):
        raise InputError(
            "there is no pair of neighbouring tokens to fit the head on",
            where="ridge_fit",
            fix="Give sequences of at least two real tokens",
        )
    z_NF = head.features(backbone.embed(tokens_BT[:, 1:][pairs_BT]), hidden_BTH[:, :-1][pairs_BT])
    h_NH = hidden_BTH[:, 1:][pairs_BT]
    u_NH = _without_gain(h_NH, backbone.final_norm.weight)
    weight_HF = _solve(z_NF, u_NH, l2)
    head.fc.weight.copy_(weight_HF)
    head.norm.weight.copy_(_gain(z_NF, h_NH, weight_HF, head.norm.eps or 0.0))


def _without_gain(h_NH: Tensor, gain_H: Tensor) -> Tensor:
    """h / w, and 0 in dimensions that the gain switches off."""
    alive_H = gain_H.abs() > 1e-6 * gain_H.abs().max()
    return torch.where(alive_H, h_NH / torch.where(alive_H, gain_H, 1.0), 0.0)


def _solve(z_NF: Tensor, u_NH: Tensor, l2: float) -> Tensor:
    features = z_NF.shape[1]
    gram_FF = torch.zeros(features, features, dtype=torch.float64, device=z_NF.device)
    cross_FH = torch.zeros(features, u_NH.shape[1], dtype=torch.float64, device=z_NF.device)
    for z, u in zip(z_NF.split(_CHUNK), u_NH.split(_CHUNK), strict=True):
        gram_FF += z.double().T @ z.double()
        cross_FH += z.double().T @ u.double()
    ridge = l2 * gram_FF.diagonal().mean()
    gram_FF.diagonal().add_(ridge)
    return torch.linalg.solve(gram_FF, cross_FH).T


def _gain(z_NF: Tensor, h_NH: Tensor, weight_HF: Tensor, eps: float) -> Tensor:
    """Per-dimension least squares of h on the normalised prediction."""
    size = h_NH.shape[1]
    up_H = torch.zeros(size, dtype=torch.float64, device=h_NH.device)
    down_H = torch.zeros_like(up_H)
    for z, h in zip(z_NF.split(_CHUNK), h_NH.split(_CHUNK), strict=True):
        x = z.double() @ weight_HF.T
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        up_H += (x * h.double()).sum(0)
        down_H += x.square().sum(0)
    return up_H / down_H.clamp_min(torch.finfo(torch.float64).tiny)
