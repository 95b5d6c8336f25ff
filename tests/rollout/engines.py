"""Engines and requests that the engine's tests share."""

import itertools

import torch
from tests.small_models import VOCAB, noisy_head

from bebop.decoding.sampling import probs_from_logits
from bebop.models.backbone import Backbone
from bebop.rollout.engine import (
    Mode,
    Request,
    SamplingParams,
    Speculation,
)
from bebop.rollout.torch_engine import TorchEngine

MODES: tuple[Mode, ...] = ("off", "target_only", "rejection")
PROMPT = (3, 1, 4)


def engine_for(backbone: Backbone, mode: Mode, *, gamma: int = 3, **kwargs) -> TorchEngine:
    return TorchEngine(
        backbone, noisy_head(backbone), speculation=Speculation(mode, gamma), **kwargs
    )


def mixed_requests(count: int = 17) -> list[Request]:
    """Prompts of 1 to 6 tokens, some shared, with different filters, lengths and stop tokens."""
    kinds = itertools.cycle(
        [
            SamplingParams(max_tokens=9),
            SamplingParams(temperature=0.6, top_k=5, max_tokens=14),
            SamplingParams(temperature=1.3, top_p=0.9, max_tokens=11, stop_token_ids=(7,)),
            SamplingParams(temperature=0.0, max_tokens=5),
        ]
    )
    prompts = [tuple((3 * i + j) % VOCAB for j in range(1 + i % 6)) for i in range(count)]
    return [
        Request(f"r{i}", prompts[i % 11], kind, seed=100 + i)
        for i, kind in zip(range(count), kinds, strict=False)
    ]


def rescored(backbone: Backbone, request: Request, tokens: list[int]) -> torch.Tensor:
    """Log p of each token by one plain pass over the whole text."""
    text = torch.tensor([[*request.prompt, *tokens]])
    logits = backbone.logits(backbone.hidden_states(text))[0, len(request.prompt) - 1 : -1]
    sampling = request.sampling
    probs = probs_from_logits(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    return probs.gather(1, torch.tensor(tokens)[:, None])[:, 0].log()
