"""A killed training goes on as if nothing had happened."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bebop.mtp_sft.checkpoints import Checkpoints
from bebop.mtp_sft.stage import Config, run

SETTINGS = {
    "steps": 24,
    "batch_size": 4,
    "warmup_steps": 6,
    "alpha_threshold": 0.1,
    "eval_every": 6,
    "checkpoint_every": 4,
    "learning_rate": 1e-3,
    "threads": 1,
}
KILLED = """
import os, signal, sys
from pathlib import Path
from bebop.mtp_sft import trainer
from bebop.mtp_sft.stage import Config, run

step = trainer.Trainer.step
def dying(self, number, loss):
    if number == 14:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, number, loss)
trainer.Trainer.step = dying
dataset, backbone, out = map(Path, sys.argv[1:4])
run(Config.from_text(sys.argv[4]), dataset=dataset, backbone=backbone, model=out / "model",
    report=out / "report.html", checkpoints=out / "checkpoints")
"""


def train(dataset: Path, backbone: Path, out: Path, **changes: object) -> dict[str, float]:
    return run(
        Config.from_values({**SETTINGS, **changes}),
        dataset=dataset,
        backbone=backbone,
        model=out / "model",
        report=out / "report.html",
        checkpoints=out / "checkpoints",
    )


@pytest.fixture(scope="module")
def uninterrupted(
    dataset: Path, tiny_backbone_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> bytes:
    out = tmp_path_factory.mktemp("uninterrupted")
    train(dataset, tiny_backbone_dir, out)
    return (out / "model" / "mtp.safetensors").read_bytes()


def test_kill_9_and_resume_give_the_same_weights_to_the_bit(
    dataset: Path,
    tiny_backbone_dir: Path,
    tmp_path: Path,
    uninterrupted: bytes,
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments = [str(dataset), str(tiny_backbone_dir), str(tmp_path)]
    text = Config.from_values(SETTINGS).to_text()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments, text], env=environment, timeout=120
    )
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "model").exists()
    train(dataset, tiny_backbone_dir, tmp_path)
    assert "resuming at step 12" in capfd.readouterr().err
    assert (tmp_path / "model" / "mtp.safetensors").read_bytes() == uninterrupted


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    dataset: Path,
    tiny_backbone_dir: Path,
    tmp_path: Path,
    uninterrupted: bytes,
    capfd: pytest.CaptureFixture[str],
) -> None:
    train(dataset, tiny_backbone_dir, tmp_path)
    newest, before = sorted((tmp_path / "checkpoints").glob("*.pt"), reverse=True)
    newest.write_bytes(newest.read_bytes()[:-100])
    train(dataset, tiny_backbone_dir, tmp_path)
    error = capfd.readouterr().err
    assert f"{newest} is damaged" in error
    assert f"from {before}" in error
    assert (tmp_path / "model" / "mtp.safetensors").read_bytes() == uninterrupted


def test_a_checkpoint_of_another_config_is_not_used(
    dataset: Path,
    tiny_backbone_dir: Path,
    tmp_path: Path,
    uninterrupted: bytes,
    capfd: pytest.CaptureFixture[str],
) -> None:
    train(dataset, tiny_backbone_dir, tmp_path, learning_rate=5e-4)
    other = load_file(tmp_path / "model" / "mtp.safetensors")
    train(dataset, tiny_backbone_dir, tmp_path)
    assert "starting afresh" in capfd.readouterr().err
    assert (tmp_path / "model" / "mtp.safetensors").read_bytes() == uninterrupted
    assert other.keys() == load_file(tmp_path / "model" / "mtp.safetensors").keys()


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "a", keep=2)
    for step in (1, 9, 10, 11):
        checkpoints.save(step, {"value": step})
    assert [f.name for f in sorted(tmp_path.iterdir())] == ["step-00000010.pt", "step-00000011.pt"]
    state = checkpoints.load()
    assert state is not None
    assert state["value"] == 11
