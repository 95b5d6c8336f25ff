"""Chain verification for a whole batch in torch: two rows of the vocabulary per request.

Only the row that emits the extra token is touched in full; the cumulative sum is taken over block
sums first and then inside the one block that holds the answer.

Shape suffixes: B requests, G draft depths, V vocabulary, K blocks, S entries of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256


def verify_chain(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    uniforms: Tensor,
    gumbel: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of each chain and emit one more token."""
    depths = draft_tokens.shape[1]
    num_accepted_B = accepted_prefix(draft_tokens, draft_probs, target_probs, uniforms)
    weight_BV = _residual(num_accepted_B, draft_probs, target_probs)
    if gumbel is None:
        last_B = invert_cdf(weight_BV, uniforms[:, depths])
    else:
        last_B = (weight_BV.log() + gumbel).argmax(dim=-1)
    return num_accepted_B, assemble(draft_tokens, num_accepted_B, last_B)


def accepted_prefix(
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor
) -> Tensor:
    """[B] drafts before the first with `u q(y) >= p(y)`, compared in fp64."""
    depths = draft_tokens.shape[1]
    token_BG1 = draft_tokens.unsqueeze(-1)
    q_BG = draft_probs.gather(-1, token_BG1).squeeze(-1).double()
    p_BG = target_probs[:, :depths].gather(-1, token_BG1).squeeze(-1).double()
    accepted_BG = uniforms[:, :depths].double() * q_BG < p_BG
    return accepted_BG.to(torch.int64).cumprod(dim=1).sum(dim=1)


def assemble(draft_tokens: Tensor, num_accepted_B: Tensor, last_B: Tensor) -> Tensor:
    """[B, G+1] accepted drafts, the extra token, then -1."""
    place_1G = torch.arange(draft_tokens.shape[1] + 1, device=draft_tokens.device).unsqueeze(0)
    end_B1 = num_accepted_B.unsqueeze(1)
    tokens_BG = torch.where(place_1G < end_B1, pad(draft_tokens, (0, 1)), -1)
    return torch.where(place_1G == end_B1, last_B.unsqueeze(1), tokens_BG)


def _residual(num_accepted_B: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """[B, V] unnormalised law of the extra token: `max(0, p - q)`, or p where nothing is left."""
    depths = draft_probs.shape[1]
    every_B = torch.arange(len(num_accepted_B), device=num_accepted_B.device)
    p_BV = _widen(target_probs[every_B, num_accepted_B])
    if depths == 0:
        return p_BV
    q_BV = _widen(draft_probs[every_B, num_accepted_B.clamp(max=depths - 1)])
    weight_BV = (p_BV - q_BV).clamp_(min=0)
    whole_B = (num_accepted_B == depths) | (weight_BV.amax(dim=-1) <= 0)
    return torch.where(whole_B.unsqueeze(-1), p_BV, weight_BV)


def _widen(probs: Tensor) -> Tensor:
    """fp64 stays; lower precisions are subtracted in fp32, which holds their difference."""
    return probs if probs.dtype == torch.float64 else probs.float()


def invert_cdf(weight_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """[B] first v with `cumsum_v > u Z` and a positive weight; sums in fp64."""
    batch, vocab = weight_BV.shape
    blocks = -(-vocab // BLOCK)
    weight_BKS = pad(weight_BV, (0, blocks * BLOCK - vocab)).view(batch, blocks, BLOCK)
    until_BK = weight_BKS.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    threshold_B1 = (uniform_B.double() * until_BK[:, -1]).unsqueeze(-1)
    block_B1 = _first(until_BK > threshold_B1, until_BK.diff(dim=-1, prepend=_zero(until_BK)) > 0)
    before_B1 = pad(until_BK, (1, 0)).gather(1, block_B1)
    inside_BS = weight_BKS[torch.arange(batch, device=weight_BV.device), block_B1.squeeze(1)]
    until_BS = before_B1 + inside_BS.double().cumsum(dim=-1)
    place_B1 = _first(until_BS > threshold_B1, inside_BS > 0)
    return (block_B1 * BLOCK + place_B1).squeeze(1)


def _zero(x_BK: Tensor) -> Tensor:
    return torch.zeros_like(x_BK[:, :1])


def _first(beyond_BK: Tensor, positive_BK: Tensor) -> Tensor:
    """[B, 1] first entry that is beyond and positive; the last positive one if rounding left
    none beyond."""
    hit_BK = beyond_BK & positive_BK
    first_B1 = hit_BK.to(torch.int8).argmax(dim=-1, keepdim=True)
    size = positive_BK.shape[1]
    last_B1 = size - 1 - positive_BK.flip(-1).to(torch.int8).argmax(dim=-1, keepdim=True)
    return torch.where(hit_BK.any(dim=-1, keepdim=True), first_B1, last_B1)
