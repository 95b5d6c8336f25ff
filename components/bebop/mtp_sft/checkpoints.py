"""Checkpoints of the training: written whole, rotated, and checked before they are used.

A file holds the SHA-256 of its payload in its first line, so that a damaged one is recognised and
the one before it is taken.
"""

import hashlib
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bebop.provenance import atomic_file

PATTERN = "step-*.pt"
DIGEST_BYTES = 64


class Checkpoints:
    """The checkpoints of one training, under one folder.

    Args:
        folder: None keeps nothing.
        fingerprint: identifies config and inputs; a checkpoint of another training is not used.
        keep: newest files that are kept.
    """

    def __init__(self, folder: Path | None, fingerprint: str, keep: int) -> None:
        self.folder, self.fingerprint, self.keep = folder, fingerprint, keep

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the state before `step`; then drop the oldest files."""
        if self.folder is None:
            return
        buffer = io.BytesIO()
        torch.save({**state, "step": step, "fingerprint": self.fingerprint}, buffer)
        payload = buffer.getvalue()
        with atomic_file(self.folder / f"step-{step:08d}.pt") as temporary:
            digest = hashlib.sha256(payload).hexdigest().encode()
            temporary.write_bytes(digest + b"\n" + payload)
        for old in self._files()[self.keep :]:
            old.unlink()

    def load(self) -> dict[str, Any] | None:
        """The newest usable state, or None; says why a file is passed over."""
        for file in self._files():
            state = _read(file)
            if state is None:
                _say(f"{file} is damaged; taking the checkpoint before it")
            elif state["fingerprint"] != self.fingerprint:
                _say(f"{file} belongs to another config or other inputs; starting afresh")
                self._clear()
                return None
            else:
                _say(f"resuming at step {state['step']} from {file}")
                return state
        return None

    def _clear(self) -> None:
        """Drop files of another training, which rotation would take for newer ones."""
        for file in self._files():
            file.unlink()

    def _files(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob(PATTERN), reverse=True) if self.folder else []


def _read(file: Path) -> dict[str, Any] | None:
    data = file.read_bytes()
    digest, payload = data[:DIGEST_BYTES], data[DIGEST_BYTES + 1 :]
    if hashlib.sha256(payload).hexdigest().encode() != digest:
        return None
    state: dict[str, Any] = torch.load(io.BytesIO(payload), weights_only=True)
    return state


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
