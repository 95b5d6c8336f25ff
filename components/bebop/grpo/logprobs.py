"""Log-probabilities of sampled tokens, without keeping logits.

The lm_head is frozen, so the gradient of `log p(y)` with respect to the hidden state is known as
soon as p is: `(W[y] - p W) / T`. It is computed in the forward pass and saved, [N, H] instead of
[N, V]: one pass over the vocabulary less than recomputation, and memory that does not grow with V.

Shape suffixes: N tokens, C tokens of a chunk, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from bebop.decoding.sampling import probs_from_logits
from bebop.models.backbone import PADDED_LOGIT, Backbone
from bebop.rollout.engine import SamplingParams

CHUNK_ELEMENTS = 2**23  # 32 MiB of fp32 logits at a time


def token_logprobs(
    backbone: Backbone, hidden_NH: Tensor, tokens_N: Tensor, sampling: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token as the engine samples it, and the entropy there.

    Args:
        backbone: its lm_head must be frozen.
        hidden_NH: states that predict the tokens.
        tokens_N: int64 sampled tokens.
        sampling: temperature above 0 and the filters. A token that a filter would now remove (it
            was sampled by an older policy) stays in the support, so that its ratio is finite.

    Returns:
        logp_N (nats, fp32, differentiable in hidden_NH) and entropy_N (nats, detached).
    """
    assert not backbone.lm_head.weight.requires_grad
    assert backbone.lm_head.bias is None
    logp_N, entropy_N = _TokenLogprobs.apply(hidden_NH, tokens_N, backbone, sampling)
    return logp_N, entropy_N


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        tokens_N: Tensor,
        backbone: Backbone,
        sampling: SamplingParams,
    ) -> tuple[Tensor, Tensor]:
        logp_N = torch.empty(len(tokens_N), device=hidden_NH.device)
        entropy_N = torch.empty_like(logp_N)
        needs_grad = ctx.needs_input_grad[0]
        gradient_NH = torch.empty_like(hidden_NH) if needs_grad else None
        size = max(1, CHUNK_ELEMENTS // backbone.vocab_size)
        for start in range(0, len(tokens_N), size):
            part = slice(start, start + size)
            logp_CV = _log_softmax(backbone, hidden_NH[part], tokens_N[part], sampling)
            logp_N[part] = logp_CV.gather(1, tokens_N[part, None])[:, 0]
            probs_CV = logp_CV.exp()
            entropy_N[part] = -(probs_CV * logp_CV).sum(dim=1)
            if gradient_NH is not None:
                weight_VH = backbone.lm_head.weight
                mean_CH = probs_CV.to(weight_VH.dtype) @ weight_VH
                gradient_NH[part] = (weight_VH[tokens_N[part]] - mean_CH) / sampling.temperature
        if gradient_NH is not None:
            ctx.save_for_backward(gradient_NH)
        ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_NH,) = ctx.saved_tensors
        return gradient_NH * upstream[0][:, None].to(gradient_NH.dtype), None, None, None


def _log_softmax(
    backbone: Backbone, hidden_CH: Tensor, tokens_C: Tensor, sampling: SamplingParams
) -> Tensor:
    """fp32 log-probabilities [C, V] at the sampling temperature, over the filters' support."""
    logits_CV = backbone.logits(hidden_CH).float() / sampling.temperature
    if sampling.filtered:
        kept_CV = probs_from_logits(logits_CV, 1.0, sampling.top_k, sampling.top_p) > 0
        kept_CV.scatter_(1, tokens_C[:, None], True)
        logits_CV.masked_fill_(~kept_CV, PADDED_LOGIT)
    return torch.log_softmax(logits_CV, dim=-1)
