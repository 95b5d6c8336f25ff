"""The decision: which sampler, which gamma, up to how many active requests, and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Literal

Sampler = Literal["rejection", "target_only"]
NAMES = {"rejection": "rejection sampling", "target_only": "target-only acceptance"}


@dataclass(frozen=True)
class Option:
    """What one setting brings at one batch size.

    Attributes:
        mode: sampler.
        gamma: drafts a round.
        batch: active requests.
        accepted: E[L], decoded, without the bonus token.
        speedup: tokens a second over plain decoding, by the measured step costs.
    """

    mode: Sampler
    gamma: int
    batch: int
    accepted: float
    speedup: float


@dataclass(frozen=True)
class Verdict:
    """What rollouts should do.

    Attributes:
        verdict: sampler, or "off".
        gamma: drafts a round (of the best setting even when the verdict is "off").
        max_batch: largest measured number of active requests at which it pays; 0 for "off".
        reason: one or two sentences.
    """

    verdict: Literal["rejection", "target_only", "off"]
    gamma: int
    max_batch: int
    reason: str


def decide(options: Sequence[Option], rollout_batch: int, margin: float) -> Verdict:
    """Take the fastest setting at the rollout batch, else the one that gains most below it.

    A rollout's batch shrinks as requests finish; where a full one does not pay, the tail may. The
    tail's gain is the geometric mean over the measured batches, plain decoding where that is
    faster.

    Args:
        options: every setting at every measured batch size, the rollout batch among them.
        rollout_batch: active requests of a rollout at its start.
        margin: speed-up from which a setting pays; above 1, since step costs are measured.
    """
    at_rollout = max((o for o in options if o.batch == rollout_batch), key=lambda o: o.speedup)
    if at_rollout.speedup >= margin:
        best = at_rollout
        reason = (
            f"At {rollout_batch} active requests {_name(best)} decodes {best.speedup:.2f} times "
            f"as fast as plain decoding, with {1 + best.accepted:.2f} tokens a verification."
        )
        return Verdict(best.mode, best.gamma, rollout_batch, reason)
    best = max(options, key=lambda o: _tail_gain(options, o, margin))
    limit = _largest(options, best, margin)
    if limit:
        pays = ", ".join(
            f"{o.speedup:.2f} at {o.batch}" for o in _alike(options, best) if o.batch <= limit
        )
        reason = (
            f"{_name(best).capitalize()} pays only up to {limit} active requests ({pays}, times "
            f"plain decoding); at {rollout_batch} the best setting reaches "
            f"{at_rollout.speedup:.2f}, so fuller batches decode plainly."
        )
        return Verdict(best.mode, best.gamma, limit, reason)
    best = max(options, key=lambda o: o.speedup)
    reason = (
        f"No setting pays: the best, {_name(best)} with {best.batch} active requests, accepts "
        f"{best.accepted:.2f} drafts a round and reaches {best.speedup:.2f} times plain decoding."
    )
    return Verdict("off", best.gamma, 0, reason)


def _alike(options: Sequence[Option], like: Option) -> list[Option]:
    """The same setting at every batch, ascending."""
    same = (o for o in options if (o.mode, o.gamma) == (like.mode, like.gamma))
    return sorted(same, key=lambda o: o.batch)


def _largest(options: Sequence[Option], like: Option, margin: float) -> int:
    """Largest batch at which the setting pays there and at every smaller one; 0 if none."""
    largest = 0
    for option in _alike(options, like):
        if option.speedup < margin:
            break
        largest = option.batch
    return largest


def _tail_gain(options: Sequence[Option], like: Option, margin: float) -> float:
    """Mean log speed-up over the measured batches, with the setting off above its limit."""
    limit, same = _largest(options, like, margin), _alike(options, like)
    return sum(log(o.speedup) for o in same if o.batch <= limit) / len(same)


def _name(option: Option) -> str:
    return f"{NAMES[option.mode]} with gamma {option.gamma}"
