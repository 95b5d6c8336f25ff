"""Timed decoding of one workload by several settings, repeats interleaved.

A shared machine drifts. Every repeat runs all settings one after the other, in an order that
rotates, and a speed-up is the ratio to plain decoding within the same repeat.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bebop.rollout.engine import Completion, Engine, EngineStats, Mode, Request, alphas
from bebop.throughput.workload import WARM_UP, Workload


@dataclass(frozen=True)
class Setting:
    """How an engine decodes; plain decoding is mode "off" with gamma 0."""

    mode: Mode
    gamma: int

    @property
    def label(self) -> str:
        """A name for tables and plots."""
        names = {"target_only": "target-only", "rejection": "rejection"}
        return f"{names[self.mode]} γ={self.gamma}" if self.gamma else "plain"


PLAIN = Setting("off", 0)
MakeEngine = Callable[[Setting, int], Engine]


@dataclass(frozen=True)
class Sample:
    """One timed run of the workload.

    Attributes:
        requests: requests completed.
        tokens: tokens emitted; drafts that were not accepted do not count.
        seconds: wall-clock time from submission to the last token.
        parts: seconds by part of the engine's round ("prefill" includes first tokens).
        rounds: batched rounds.
        request_rounds: rounds summed over the requests active in them.
        proposed, accepted: drafts tested and accepted, a depth.
    """

    requests: int
    tokens: int
    seconds: float
    parts: dict[str, float]
    rounds: int
    request_rounds: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over wall-clock time, prompts included."""
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """The same without prefill; 0 when every request ended with its first token.

        A request's first token comes out of its prefill and is left out with it.
        """
        seconds = self.seconds - self.parts.get("prefill", 0.0)
        return (self.tokens - self.requests) / seconds


def measure_batch(
    make_engine: MakeEngine,
    settings: Sequence[Setting],
    workload: Workload,
    batch: int,
    repeats: int,
    advance: Callable[[str], None],
    seconds: float = math.inf,
) -> dict[Setting, list[Sample]]:
    """Run the workload `repeats` times with every setting at one batch size.

    Args:
        make_engine: from setting and batch size.
        settings: what is compared.
        workload: the requests.
        batch: requests decoded at once.
        repeats: counted runs of each setting, after one that is not counted.
        advance: called after every run, with what ran.
        seconds: no repeat is begun that would end later than this; the first is always run.

    Returns:
        Each setting's samples; entry r of every list belongs to repeat r.
    """
    engines = {setting: make_engine(setting, batch) for setting in settings}
    samples: dict[Setting, list[Sample]] = {setting: [] for setting in settings}
    begin = last = time.perf_counter()
    try:
        for repeat in range(WARM_UP, repeats):
            now = time.perf_counter()
            if repeat > 0 and now - begin + (now - last) > seconds:
                break
            last = now
            requests = workload.requests(batch, repeat)
            for setting in _rotated(settings, repeat):
                sample = timed(engines[setting], requests)
                if repeat != WARM_UP:
                    samples[setting].append(sample)
                advance(f"batch {batch}, {setting.label}")
    finally:
        for engine in engines.values():
            engine.close()
    return samples


def _rotated(settings: Sequence[Setting], repeat: int) -> list[Setting]:
    start = repeat % len(settings)
    return [*settings[start:], *settings[:start]]


def timed(engine: Engine, requests: Sequence[Request]) -> Sample:
    """Generate once and return what it took."""
    before = engine.stats()
    start = time.perf_counter()
    completions = engine.generate(requests)
    seconds = time.perf_counter() - start
    return _sample(completions, seconds, before, engine.stats())


def _sample(
    completions: Sequence[Completion], seconds: float, before: EngineStats, after: EngineStats
) -> Sample:
    parts = {name: after.seconds[name] - before.seconds.get(name, 0.0) for name in after.seconds}
    tokens = sum(len(completion.tokens) for completion in completions)
    assert tokens == after.tokens - before.tokens, "an engine's counters must match its output"
    return Sample(
        requests=len(completions),
        tokens=tokens,
        seconds=seconds,
        parts=parts,
        rounds=after.rounds - before.rounds,
        request_rounds=after.request_rounds - before.request_rounds,
        proposed=_difference(after.proposed, before.proposed),
        accepted=_difference(after.accepted, before.accepted),
    )


def _difference(after: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(after, before, strict=True))


def total_alphas(samples: Sequence[Sample]) -> list[float]:
    """Conditional acceptance per depth, from the counts of all samples together."""
    proposed = [sum(counts) for counts in zip(*(s.proposed for s in samples), strict=True)]
    accepted = [sum(counts) for counts in zip(*(s.accepted for s in samples), strict=True)]
    return alphas(proposed, accepted)
