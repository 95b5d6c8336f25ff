"""The oracle of chain verification: one request at a time, in fp64, as the proof reads.

Shape suffixes: B requests, G draft depths, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def verify_chain(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    uniforms: Tensor,
    gumbel: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of the chain and emit one more token, for each request."""
    batch, depths = draft_tokens.shape
    num_accepted_B = torch.zeros(batch, dtype=torch.int64)
    tokens_BG = torch.full((batch, depths + 1), -1, dtype=torch.int64)
    for b in range(batch):
        n = _accepted_prefix(draft_tokens[b], draft_probs[b], target_probs[b], uniforms[b])
        q_V = draft_probs[b, n].double() if n < depths else None
        weight_V = residual_weights(target_probs[b, n].double(), q_V)
        if gumbel is None:
            last = invert_cdf(weight_V, float(uniforms[b, depths]))
        else:
            last = int((weight_V.log() + gumbel[b]).argmax())
        num_accepted_B[b] = n
        tokens_BG[b, :n] = draft_tokens[b, :n]
        tokens_BG[b, n] = last
    return num_accepted_B.to(draft_tokens.device), tokens_BG.to(draft_tokens.device)


def _accepted_prefix(tokens_G: Tensor, q_GV: Tensor, p_GV: Tensor, u_G: Tensor) -> int:
    """Number of drafts before the first with `u q(y) >= p(y)`."""
    for i, token in enumerate(tokens_G.tolist()):
        if not float(u_G[i]) * float(q_GV[i, token]) < float(p_GV[i, token]):
            return i
    return len(tokens_G)


def residual_weights(p_V: Tensor, q_V: Tensor | None) -> Tensor:
    """Unnormalised law of the extra token: `max(0, p - q)`, or p when every draft was accepted.

    When p and q are equal nothing is left over, and the law is p.
    """
    if q_V is None:
        return p_V
    weight_V = (p_V - q_V).clamp(min=0)
    return weight_V if bool(weight_V.sum() > 0) else p_V


def invert_cdf(weight_V: Tensor, uniform: float) -> int:
    """First v with `cumsum_v > u Z`: strict, so that u = 0 never emits a weight of 0."""
    cumulative_V = weight_V.cumsum(dim=0)
    hit_V = (cumulative_V > uniform * cumulative_V[-1]) & (weight_V > 0)
    if bool(hit_V.any()):
        return int(hit_V.to(torch.int8).argmax())
    return int(weight_V.nonzero()[-1])
