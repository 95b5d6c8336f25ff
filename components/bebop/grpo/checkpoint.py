"""The trainer's checkpoint: policy, optimiser, RNG, and how far the run is.

The prompt cursor is the version: step v took groups v*P .. (v+1)*P - 1 (see `rollout.buffer`), so
the samples that were in flight need no place here. They are sampled again.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bebop.provenance import atomic_dir, read_manifest, write_json

STATE = "state.pt"
PROGRESS = "progress.json"
PREFIX = "step-"


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        version: steps done, which is also the version of the policy.
        history: metrics of every step done, in order.
        groups: sequence numbers that were trained, step by step.
        before: held-out metrics of the policy before training.
        after: the same of the trained policy, once there is one.
        requeued: groups sampled again because their worker died.
    """

    version: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    requeued: int = 0


def write_checkpoint(
    folder: Path, fingerprint: str, progress: Progress, state: dict[str, Any]
) -> None:
    """Write `state.pt` and `progress.json` into `folder`."""
    torch.save(state, folder / STATE)
    write_json(folder / PROGRESS, {"version": 1, "fingerprint": fingerprint, **_fields(progress)})


def _fields(progress: Progress) -> dict[str, Any]:
    values = dict(vars(progress))
    return {"step": values.pop("version"), **values}


def read_checkpoint(folder: Path) -> tuple[str, Progress, dict[str, Any]]:
    """Fingerprint, progress and trainer state of a checkpoint folder.

    Raises:
        ArtifactError: it is missing, damaged or of an unknown version.
    """
    record = read_manifest(folder, PROGRESS)
    del record["version"]
    fingerprint = str(record.pop("fingerprint"))
    progress = Progress(version=record.pop("step"), **record)
    state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    return fingerprint, progress, state


class Checkpoints:
    """The checkpoints of one stage run: the newest is kept, an older one only until then.

    Args:
        folder: where they lie; None keeps none.
        fingerprint: of config and inputs; a checkpoint with another one is not used.
    """

    def __init__(self, folder: Path | None, fingerprint: str) -> None:
        self.folder, self.fingerprint = folder, fingerprint

    def save(self, progress: Progress, state: dict[str, Any]) -> None:
        """Write a new checkpoint, then remove the older ones: at no moment is there none."""
        if self.folder is None:
            return
        target = self.folder / f"{PREFIX}{progress.version:06d}"
        with atomic_dir(target) as temporary:
            write_checkpoint(temporary, self.fingerprint, progress, state)
        for old in self._all():
            if old != target:
                shutil.rmtree(old)

    def newest(self) -> tuple[Progress, dict[str, Any]] | None:
        """The last checkpoint of this very run, or None."""
        for folder in reversed(self._all()):
            fingerprint, progress, state = read_checkpoint(folder)
            if fingerprint == self.fingerprint:
                return progress, state
        return None

    @property
    def foreign(self) -> bool:
        """Whether checkpoints of another config or other inputs lie here."""
        return bool(self._all())

    def clear(self) -> None:
        """Remove every checkpoint: the outputs are written."""
        for folder in self._all():
            shutil.rmtree(folder)

    def _all(self) -> list[Path]:
        if self.folder is None or not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if path.name.startswith(PREFIX))
