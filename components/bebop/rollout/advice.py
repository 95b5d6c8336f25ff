"""What the diagnosis recommends to whoever generates."""

from pathlib import Path
from typing import cast

from bebop.errors import ArtifactError
from bebop.provenance import read_manifest
from bebop.rollout.engine import Mode, Speculation


def read_advice(diagnosis: Path) -> Speculation:
    """The recommendation in `diagnosis.json`: sampler, gamma, largest batch at which it pays.

    Raises:
        ArtifactError: missing, damaged, of an unknown version, or without a recommendation.
    """
    record = read_manifest(diagnosis, "diagnosis.json")
    mode, gamma, largest = (record.get(name) for name in ("verdict", "gamma", "max_batch"))
    known = mode in ("off", "target_only", "rejection")
    if not (known and isinstance(gamma, int) and isinstance(largest, int)):
        raise ArtifactError(
            f"no recommendation: verdict {mode!r}, gamma {gamma!r}, max_batch {largest!r}",
            where=str(diagnosis / "diagnosis.json"),
            fix="Rerun diagnosis, or set grpo.speculation and grpo.gamma",
        )
    return Speculation(cast(Mode, mode), gamma, largest)
