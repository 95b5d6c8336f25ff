"""Which setting to use at which batch size, and whether the diagnosis was right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bebop.rollout.advice import read_advice
from bebop.throughput.bench import PLAIN, Setting
from bebop.throughput.cells import Cell


@dataclass(frozen=True)
class Advice:
    """What `diagnosis` recommended before the policy was trained.

    Attributes:
        setting: sampler and gamma, or plain decoding.
        max_batch: largest batch at which it was expected to pay.
    """

    setting: Setting
    max_batch: int

    @classmethod
    def of(cls, diagnosis: Path) -> Self:
        """The advice in a diagnosis's folder."""
        advised = read_advice(diagnosis)
        plain = advised.mode == "off"
        return cls(PLAIN if plain else Setting(advised.mode, advised.gamma), advised.max_batch)

    def at(self, batch: int) -> Setting:
        """The recommended setting at a batch size."""
        return self.setting if batch <= self.max_batch else PLAIN


@dataclass(frozen=True)
class Choice:
    """The fastest speculative setting at a batch size, and whether it pays."""

    fastest: Cell
    pays: bool

    @property
    def batch(self) -> int:
        return self.fastest.batch

    @property
    def setting(self) -> Setting:
        """What to use."""
        return self.fastest.setting if self.pays else PLAIN


@dataclass(frozen=True)
class Verdict:
    """The decision.

    Attributes:
        choices: by batch size, ascending.
        stops_at: smallest measured batch from which on no setting pays; None if some setting
            pays at the largest.
        confirms: whether the measured speed-ups agree with the advice at every batch size.
        text: the same in sentences.
    """

    choices: list[Choice]
    stops_at: int | None
    confirms: bool
    text: str

    @property
    def best(self) -> Cell:
        """The cell with the largest speed-up."""
        return max((c.fastest for c in self.choices), key=lambda cell: cell.speedup.median)


def decide(cells: Sequence[Cell], advice: Advice, margin: float) -> Verdict:
    """Pick the fastest setting of every batch size.

    Args:
        cells: all measurements.
        advice: the diagnosis's recommendation.
        margin: speed-up from which a setting pays.
    """
    by_batch: dict[int, list[Cell]] = {}
    for cell in cells:
        if cell.setting != PLAIN:
            by_batch.setdefault(cell.batch, []).append(cell)
    choices = []
    for batch in sorted(by_batch):
        fastest = max(by_batch[batch], key=lambda cell: cell.speedup.median)
        choices.append(Choice(fastest, fastest.speedup.median >= margin))
    stops_at = _stops_at(choices)
    confirms = all(_confirms(choice, by_batch[choice.batch], advice) for choice in choices)
    text = _text(choices, stops_at, advice, confirms)
    return Verdict(choices, stops_at, confirms, text)


def _stops_at(choices: Sequence[Choice]) -> int | None:
    stops_at = None
    for choice in reversed(choices):
        if choice.pays:
            break
        stops_at = choice.batch
    return stops_at


def _confirms(choice: Choice, cells: Sequence[Cell], advice: Advice) -> bool:
    """Advised speculation must not slow down; advised plain decoding must not be beaten."""
    setting = advice.at(choice.batch)
    if setting == PLAIN:
        return not choice.pays
    return any(c.setting == setting and c.speedup.median >= 1.0 for c in cells)


def _text(choices: Sequence[Choice], stops_at: int | None, advice: Advice, confirms: bool) -> str:
    parts = [_choice_text(choice) for choice in choices if choice.pays]
    if stops_at is not None:
        at = next(choice for choice in choices if choice.batch == stops_at)
        everywhere = stops_at == choices[0].batch
        where = "at any batch size measured" if everywhere else f"at batch {stops_at} and above"
        parts.append(
            f"Speculation does not pay {where}: at batch {stops_at} the best setting, "
            f"{at.fastest.setting.label}, reaches {at.fastest.speedup} times plain decoding. "
            "Decode plainly there."
        )
    return " ".join([*parts, _advice_text(advice, confirms)])


def _choice_text(choice: Choice) -> str:
    cell = choice.fastest
    return (
        f"Batch {cell.batch}: {cell.setting.label} is {cell.speedup} times as fast as plain "
        f"decoding, {cell.accept_length:.2f} tokens a round."
    )


def _advice_text(advice: Advice, confirms: bool) -> str:
    if advice.setting == PLAIN:
        said = "no speculation"
    else:
        said = f"{advice.setting.label} up to batch {advice.max_batch}"
    return f"The diagnosis advised {said}; this {'agrees' if confirms else 'does not agree'}."


def choice_record(choice: Choice) -> Mapping[str, Any]:
    """An entry of `throughput.json`: what to use at a batch size."""
    return {
        "batch": choice.batch,
        "pays": choice.pays,
        "mode": choice.setting.mode,
        "gamma": choice.setting.gamma,
        "fastest": {
            "mode": choice.fastest.setting.mode,
            "gamma": choice.fastest.setting.gamma,
            "speedup": choice.fastest.speedup.record(),
        },
    }
