"""Checkpoints: whole, of this run only, never none."""

import pytest
import torch

from bebop.errors import ArtifactError
from bebop.grpo.checkpoint import Checkpoints, Progress
from bebop.grpo.setup import fingerprint, resume
from bebop.grpo.stage import Config


class Trained:
    """A trainer reduced to its state."""

    def __init__(self, value=0.0):
        self.value = torch.tensor(value)

    def state(self):
        return {"value": self.value}

    def restore(self, state):
        self.value = state["value"]


def progress_at(version):
    return Progress(version, [{"reward/mean": 0.5}] * version, [[n] for n in range(version)])


def test_what_is_saved_comes_back_and_only_the_newest_stays(tmp_path):
    kept = Checkpoints(tmp_path / "kept", "one")
    for version in (2, 4):
        kept.save(progress_at(version), Trained(version).state())
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step-000004"]
    trainer = Trained()
    assert resume(kept, trainer) == progress_at(4)
    assert trainer.value == 4


def test_a_half_written_checkpoint_is_not_seen(tmp_path):
    kept = Checkpoints(tmp_path, "one")
    kept.save(progress_at(2), {})
    (tmp_path / ".step-000004.x1").mkdir()
    found = kept.newest()
    assert found is not None
    assert found[0].version == 2


def test_another_runs_checkpoints_are_removed_and_that_is_said(tmp_path, capsys):
    Checkpoints(tmp_path, "one").save(progress_at(2), Trained(2.0).state())
    trainer = Trained()
    assert resume(Checkpoints(tmp_path, "two"), trainer) == Progress()
    assert trainer.value == 0
    assert "starting afresh" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_nothing_is_kept():
    kept = Checkpoints(None, "")
    kept.save(progress_at(1), {})
    assert kept.newest() is None
    kept.clear()


def test_an_unknown_version_is_refused(tmp_path):
    kept = Checkpoints(tmp_path, "one")
    kept.save(progress_at(1), {})
    file = tmp_path / "step-000001" / "progress.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 7'))
    with pytest.raises(ArtifactError, match="version 7 is not known"):
        kept.newest()


def test_the_fingerprint_sees_config_and_contents(tmp_path):
    file = tmp_path / "input"
    file.write_text("a")
    first = fingerprint(Config(), {"model": file})
    assert fingerprint(Config(), {"model": file}) == first
    assert fingerprint(Config(seed=1), {"model": file}) != first
    file.write_text("b")
    assert fingerprint(Config(), {"model": file}) != first
