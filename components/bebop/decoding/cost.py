"""When speculation pays: step costs measured on the decoder itself, and the model over them.

    tokens a second and request = (1 + E[L]) / (t_verify + gamma * t_draft + t_sampler)
    speed-up                    = that * t_decode

`t_decode` is a whole plain round. All times are seconds for one round of the whole batch, so that
the batch cancels out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from bebop.decoding.acceptance import expected_length
from bebop.decoding.loop import Admission, Decoder
from bebop.models.backbone import Backbone
from bebop.models.mtp_head import MTPHead

_TRUNK_PARTS = ("verify", "lm_head")


@dataclass(frozen=True)
class RoundCost:
    """Seconds of one speculative round: trunk and lm_head over gamma + 1 rows, one draft depth
    (head, lm_head, draw; mean over the depths), and softmax, filters, verifier."""

    verify: float
    draft: float
    sampler: float

    def total(self, gamma: int) -> float:
        return self.verify + gamma * self.draft + self.sampler


@dataclass(frozen=True)
class StepCosts:
    """Costs at one batch size and context length.

    Attributes:
        batch: active requests.
        context: tokens a request holds.
        decode: seconds of a plain round.
        rounds: gamma -> cost of a round with that many drafts.
    """

    batch: int
    context: int
    decode: float
    rounds: dict[int, RoundCost]


def measure_step_costs(
    backbone: Backbone,
    head: MTPHead,
    *,
    batch: int,
    gammas: Sequence[int],
    context: int = 64,
    repeats: int = 5,
    greedy: bool = False,
) -> StepCosts:
    """Median costs over rounds of a decoder on random text, the kinds of round interleaved.

    Args:
        batch: active requests.
        gammas: drafts a round to measure.
        context: prompt tokens of each request.
        repeats: measured rounds a kind, after one that is not counted.
        greedy: measure target-only drafts.
    """
    decoder = Decoder(backbone, head, slots=batch)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(backbone.token_count, (batch, context), generator=generator).tolist()
    admissions = [Admission(tuple(prompt), seed) for seed, prompt in enumerate(prompts)]
    decoder.admit(admissions, with_head=True)
    samples: dict[int, list[dict[str, float]]] = {gamma: [] for gamma in (0, *gammas)}
    for repeat in range(repeats + 1):
        for gamma, seen in samples.items():
            decoder.seconds.clear()
            decoder.round(gamma, greedy=greedy)
            if repeat > 0:
                seen.append(dict(decoder.seconds))
    decode = median(sum(parts.values()) for parts in samples[0])
    rounds = {gamma: _round_cost(samples[gamma], gamma) for gamma in gammas}
    return StepCosts(batch, context, decode, rounds)


def _round_cost(samples: list[dict[str, float]], gamma: int) -> RoundCost:
    return RoundCost(
        verify=median(sum(parts[name] for name in _TRUNK_PARTS) for parts in samples),
        draft=median(parts["draft"] for parts in samples) / gamma,
        sampler=median(parts["sample"] for parts in samples),
    )


def speedup(costs: StepCosts, gamma: int, length: float) -> float:
    """Predicted ratio of tokens a second to plain decoding, from E[L] accepted drafts a round."""
    return (1.0 + length) * costs.decode / costs.rounds[gamma].total(gamma)


def break_even(costs: StepCosts, gamma: int) -> float:
    """E[L] above which gamma drafts are faster than plain decoding; above gamma it never pays."""
    return costs.rounds[gamma].total(gamma) / costs.decode - 1.0


def choose_gamma(alphas: Sequence[float], costs: StepCosts, *, margin: float = 0.0) -> int:
    """The gamma with the best predicted speed-up, or 0 when none gains more than `margin`.

    Args:
        alphas: conditional acceptance per depth; deeper gammas than it covers are not considered.
        costs: measured at the batch size in question.
        margin: predicted gain below which speculation stays off, e.g. 0.05.
    """
    best, choice = 1.0 + margin, 0
    for gamma in sorted(costs.rounds):
        if gamma > len(alphas):
            continue
        gain = speedup(costs, gamma, float(expected_length(torch.tensor(alphas[:gamma]))))
        if gain > best:
            best, choice = gain, gamma
    return choice


def break_even_batch(alphas: Sequence[float], costs: Sequence[StepCosts]) -> int:
    """Largest measured batch up to which speculation pays at every measured size; 0 if none.

    What `Speculation.max_batch` takes, except that 0 means "never" here and "no limit" there.
    """
    largest = 0
    for at_batch in sorted(costs, key=lambda c: c.batch):
        if choose_gamma(alphas, at_batch) == 0:
            break
        largest = at_batch.batch
    return largest
