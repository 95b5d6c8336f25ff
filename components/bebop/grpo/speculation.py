"""Whether rollouts speculate: as configured, or as the diagnosis recommends."""

from pathlib import Path
from typing import Literal

from bebop.rollout.advice import read_advice
from bebop.rollout.engine import Speculation

Choice = Literal["auto", "off", "target_only", "rejection"]


def choose_speculation(choice: Choice, gamma: int, diagnosis: Path) -> Speculation:
    """Resolve the configured choice.

    Args:
        choice: a mode, or "auto" for what `diagnosis.json` recommends.
        gamma: drafts a round; 0 takes the diagnosis' gamma.
        diagnosis: folder of the diagnosis.

    Raises:
        ArtifactError: the diagnosis is missing or does not say what is needed.
    """
    if choice != "auto" and gamma:
        return Speculation(choice, gamma)
    advice = read_advice(diagnosis)
    if choice == "auto":
        return Speculation(advice.mode, gamma or advice.gamma, advice.max_batch)
    return Speculation(choice, advice.gamma or Speculation.gamma)
