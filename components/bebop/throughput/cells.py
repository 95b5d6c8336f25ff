"""From timed samples to one result a setting and batch size, with the prediction beside it."""

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bebop.decoding.cost import StepCosts, break_even, speedup
from bebop.errors import StageError
from bebop.throughput.bench import PLAIN, Sample, Setting, total_alphas
from bebop.throughput.statistics import Spread, correlation, spread


@dataclass(frozen=True)
class Cell:
    """What one setting did at one batch size.

    Attributes:
        setting, batch: which.
        tokens_per_second: emitted tokens over wall-clock time, prompts included.
        decode_tokens_per_second: the same without prefill and first tokens.
        speedup: tokens_per_second over plain decoding's in the same repeat.
        decode_speedup: the same ratio without prefill: what the model predicts.
        alphas: conditional acceptance per depth, from counts.
        tokens_per_round: tokens a request got in a round, the cut last round included.
        mean_active: requests active in a round, on average; below `batch` when they end apart.
        repeats: runs that the medians are of.
        tokens: emitted in a run, on average.
        response_length: tokens a request.
        seconds: median seconds of a run by part; "other" is what no part accounts for.
        predicted: decode speed-up from step costs and counted acceptance; 1 for plain decoding.
        break_even: E[L] from which the setting is faster than plain; 0 for plain decoding.
    """

    setting: Setting
    batch: int
    tokens_per_second: Spread
    decode_tokens_per_second: Spread
    speedup: Spread
    decode_speedup: Spread
    alphas: list[float]
    tokens_per_round: float
    mean_active: float
    repeats: int
    tokens: float
    response_length: float
    seconds: dict[str, float]
    predicted: float
    break_even: float

    @property
    def accepted(self) -> float:
        """E[L]: accepted drafts a round, without the bonus token (arXiv 2606.12370 eq. 12)."""
        return sum(self.cumulative)

    @property
    def accept_length(self) -> float:
        """Tokens a round emits, the bonus token included: 1 + E[L]."""
        return 1.0 + self.accepted

    @property
    def cumulative(self) -> list[float]:
        """Probability that the drafts up to each depth are all accepted."""
        return cumulative_acceptance(self.alphas)

    @property
    def prediction_error(self) -> float:
        """Predicted over measured decode speed-up, minus 1."""
        return self.predicted / self.decode_speedup.median - 1.0

    def record(self) -> dict[str, Any]:
        """An entry of `throughput.json`."""
        return {
            "mode": self.setting.mode,
            "gamma": self.setting.gamma,
            "batch": self.batch,
            "tokens_per_second": self.tokens_per_second.record(),
            "decode_tokens_per_second": self.decode_tokens_per_second.record(),
            "speedup": self.speedup.record(),
            "decode_speedup": self.decode_speedup.record(),
            "alpha": self.alphas,
            "cumulative": self.cumulative,
            "accept_length": self.accept_length,
            "tokens_per_round": self.tokens_per_round,
            "mean_active": self.mean_active,
            "repeats": self.repeats,
            "tokens": self.tokens,
            "response_length": self.response_length,
            "seconds": self.seconds,
            "predicted_speedup": self.predicted,
            "break_even": self.break_even,
        }


def make_cells(
    samples: Mapping[Setting, Sequence[Sample]],
    batch: int,
    costs: Mapping[str, StepCosts],
) -> list[Cell]:
    """The cells of one batch size; entry r of every list is repeat r.

    Args:
        samples: by setting, plain decoding among them.
        batch: requests decoded at once.
        costs: step costs by sampler.

    Raises:
        StageError: a run in which no round was decoded.
    """
    plain = samples[PLAIN]
    if any(s.request_rounds == 0 for own in samples.values() for s in own):
        raise StageError(
            "every completion ended with its first token, so nothing was decoded",
            where=f"throughput, batch {batch}",
            fix="Set throughput.ignore_stop, or look at what the policy writes",
        )
    return [_cell(setting, batch, own, plain, costs) for setting, own in samples.items()]


def _cell(
    setting: Setting,
    batch: int,
    own: Sequence[Sample],
    plain: Sequence[Sample],
    costs: Mapping[str, StepCosts],
) -> Cell:
    pairs = list(zip(own, plain, strict=True))
    rounds = sum(s.request_rounds for s in own)
    depths = total_alphas(own)
    predicted, least = (1.0, 0.0) if setting == PLAIN else _predict(setting, depths, costs)
    return Cell(
        setting=setting,
        batch=batch,
        tokens_per_second=spread([s.tokens_per_second for s in own]),
        decode_tokens_per_second=spread([s.decode_tokens_per_second for s in own]),
        speedup=spread([s.tokens_per_second / p.tokens_per_second for s, p in pairs]),
        decode_speedup=spread(
            [s.decode_tokens_per_second / p.decode_tokens_per_second for s, p in pairs]
        ),
        alphas=depths,
        tokens_per_round=sum(s.tokens - s.requests for s in own) / rounds,
        mean_active=rounds / sum(s.rounds for s in own),
        repeats=len(own),
        tokens=sum(s.tokens for s in own) / len(own),
        response_length=sum(s.tokens for s in own) / sum(s.requests for s in own),
        seconds=_time_split(own),
        predicted=predicted,
        break_even=least,
    )


def _predict(
    setting: Setting, depths: Sequence[float], costs: Mapping[str, StepCosts]
) -> tuple[float, float]:
    own, accepted = costs[setting.mode], sum(cumulative_acceptance(depths))
    return speedup(own, setting.gamma, accepted), break_even(own, setting.gamma)


def cumulative_acceptance(depths: Sequence[float]) -> list[float]:
    """Running product of the conditional acceptances."""
    return list(itertools.accumulate(depths, operator.mul))


def _time_split(samples: Sequence[Sample]) -> dict[str, float]:
    names = sorted({name for sample in samples for name in sample.parts})
    split = {name: median(s.parts.get(name, 0.0) for s in samples) for name in names}
    split["other"] = median(s.seconds - sum(s.parts.values()) for s in samples)
    return split


def acceptance_correlation(cells: Sequence[Cell], batch: int) -> float | None:
    """Pearson's r between accept length and speed-up over the settings at a batch size."""
    own = [c for c in cells if c.batch == batch and c.setting != PLAIN]
    return correlation([c.accept_length for c in own], [c.speedup.median for c in own])
