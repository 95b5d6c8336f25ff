"""What the stage leaves behind: the policy folder and the run's metrics."""

from collections.abc import Mapping
from pathlib import Path

from bebop.grpo.checkpoint import write_checkpoint
from bebop.grpo.setup import Training
from bebop.grpo.stage import Config
from bebop.grpo.steplog import run_metrics
from bebop.models.checkpoint import hash_tensors, head_tensors, save_model
from bebop.provenance import atomic_dir, write_provenance

CHECKPOINT = "trainer"


def final_metrics(training: Training) -> dict[str, float]:
    """The run in one row; see `steplog.run_metrics`."""
    progress = training.loop.progress
    return {
        **run_metrics(progress.history),
        **progress.before,
        **progress.after,
        "groups/requeued": float(progress.requeued),
    }


def write_policy(
    config: Config, training: Training, inputs: Mapping[str, Path], policy: Path
) -> None:
    """Write the model folder with the untouched head, and the trainer's state beside it."""
    loop = training.loop
    assert hash_tensors(head_tensors(loop.head)) == training.head_hash, "the head changed"
    with atomic_dir(policy) as folder:
        save_model(folder, loop.trainer.backbone, loop.head, training.meta)
        checkpoint = folder / CHECKPOINT
        checkpoint.mkdir()
        state = loop.trainer.state()
        write_checkpoint(checkpoint, loop.checkpoints.fingerprint, loop.progress, state)
        write_provenance(folder, "grpo", config.model_dump(mode="json"), inputs)
