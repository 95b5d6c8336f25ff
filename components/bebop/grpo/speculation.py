"""Whether rollouts speculate: as configured, or as the diagnosis recommends."""

from pathlib import Path
from typing import Any, Literal

from bebop.errors import ArtifactError
from bebop.provenance import read_manifest
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
    advice = _recommendation(diagnosis)
    mode = advice["mode"] if choice == "auto" else choice
    max_batch = advice["max_batch"] if choice == "auto" else 0
    return Speculation(mode, gamma or advice["gamma"] or Speculation.gamma, max_batch)


def _recommendation(diagnosis: Path) -> dict[str, Any]:
    record = read_manifest(diagnosis, "diagnosis.json")
    advice = record.get("recommendation", {})
    if missing := {"mode", "gamma", "max_batch"} - set(advice):
        raise ArtifactError(
            f"diagnosis.json has no recommendation.{min(missing)}",
            where=str(diagnosis),
            fix="Rerun diagnosis, or set grpo.speculation and grpo.gamma",
        )
    return dict(advice)
