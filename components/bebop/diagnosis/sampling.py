"""On-policy text and what was counted while it was decoded."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bebop.dataset import Prompt
from bebop.decoding.teacher_forced import Text
from bebop.models.backbone import Backbone
from bebop.models.mtp_head import MTPHead
from bebop.rollout.engine import Completion, Mode, Request, SamplingParams, Speculation
from bebop.rollout.torch_engine import TorchEngine

# Request seeds of the two samplers lie far apart, so that no draw is shared between them.
SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class Decoded:
    """One decoding of the prompts with speculation; N requests, G depths.

    Attributes:
        mode: sampler.
        texts: [N] prompt and response.
        prompt_N: index of the prompt of each request.
        logprobs: [N] log p of each response token, as the engine gave them.
        rounds_N: verifications after the prompt.
        emitted_N: tokens emitted in them.
        proposed_NG, accepted_NG: drafts put to the test and accepted, a depth.
        seconds: wall-clock time, prompts included.
    """

    mode: Mode
    texts: list[Text]
    prompt_N: NDArray[np.int64]
    logprobs: list[list[float]]
    rounds_N: NDArray[np.int64]
    emitted_N: NDArray[np.int64]
    proposed_NG: NDArray[np.int64]
    accepted_NG: NDArray[np.int64]
    seconds: float

    def accepted_by_gamma(self) -> list[float]:
        """E[L] for gamma = 1 .. G: accepted drafts a round, without the bonus token."""
        rounds = max(1, int(self.rounds_N.sum()))
        return [float(x) for x in self.accepted_NG.sum(axis=0).cumsum() / rounds]

    def alphas(self) -> list[float]:
        """Conditional acceptance a depth; NaN where nothing was put to the test."""
        proposed, accepted = self.proposed_NG.sum(axis=0), self.accepted_NG.sum(axis=0)
        return [a / p if p else float("nan") for a, p in zip(accepted, proposed, strict=True)]


def decode(
    backbone: Backbone,
    head: MTPHead,
    prompts: Sequence[Prompt],
    samples: int,
    sampling: SamplingParams,
    speculation: Speculation,
    *,
    max_batch: int,
    seed: int,
) -> Decoded:
    """Sample every prompt `samples` times with the engine that rollouts use."""
    requests = [
        Request(
            f"{number}.{sample}",
            prompt.tokens,
            sampling,
            seed=seed * SEED_STRIDE + number * samples + sample,
        )
        for number, prompt in enumerate(prompts)
        for sample in range(samples)
    ]
    longest = max(len(prompt.tokens) for prompt in prompts)
    engine = TorchEngine(
        backbone,
        head,
        speculation=speculation,
        max_batch=max_batch,
        max_length=longest + sampling.max_tokens + speculation.gamma + 2,
    )
    start = time.perf_counter()
    completions = engine.generate(requests)
    seconds = time.perf_counter() - start
    engine.close()
    return _collect(speculation.mode, requests, completions, samples, seconds)


def _collect(
    mode: Mode,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    samples: int,
    seconds: float,
) -> Decoded:
    texts = [
        Text(
            request.prompt + tuple(completion.tokens),
            (0,) * len(request.prompt) + (1,) * len(completion.tokens),
        )
        for request, completion in zip(requests, completions, strict=True)
    ]
    return Decoded(
        mode,
        texts,
        np.arange(len(requests)) // samples,
        [completion.logprobs for completion in completions],
        np.array([completion.rounds for completion in completions]),
        # The first token comes from the prompt's own pass.
        np.array([len(completion.tokens) - 1 for completion in completions]),
        np.array([completion.proposed for completion in completions]),
        np.array([completion.accepted for completion in completions]),
        seconds,
    )
