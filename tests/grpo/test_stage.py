"""The whole stage on a tiny model and a real local Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.grpo.conftest import write_diagnosis

from bebop.errors import ArtifactError, InputError, StageError
from bebop.grpo.checkpoint import read_checkpoint
from bebop.grpo.stage import Config, run
from bebop.metrics import unknown_metrics
from bebop.models.backbone import load_backbone
from bebop.models.checkpoint import hash_tensors, head_tensors, load_model

STEPS, PROMPTS = 5, 3
SETTINGS = {
    "steps": STEPS,
    "prompts_per_step": PROMPTS,
    "samples_per_prompt": 8,
    "train_layers": 1,
    "learning_rate": 3e-3,
    "eval_prompts": 6,
    "checkpoint_every": 2,
    "threads": 1,
}


class Recorder:
    """A tracker that keeps what it is told, and calls back after each step."""

    run_id = "recorder"

    def __init__(self, after_step=lambda step: None):
        self.rows, self.after_step = [], after_step

    def log(self, metrics, step=None):
        assert not unknown_metrics(list(metrics))
        self.rows.append((step, dict(metrics)))
        self.after_step(step)


def run_stage(inputs, folder, tracker=None, checkpoints=None, **changes):
    """Run with the tests' settings; returns metrics, policy folder and report."""
    config = Config(**{**SETTINGS, **changes})
    policy, report = folder / "policy", folder / "report.html"
    tracker = tracker or Recorder()
    metrics = run(
        config, **inputs, policy=policy, report=report, tracker=tracker, checkpoints=checkpoints
    )
    return metrics, policy, report


def policy_hash(policy: Path) -> str:
    return hash_tensors(dict(load_backbone(policy).model.named_parameters()))


def trained_groups(policy: Path) -> list[int]:
    _, progress, _ = read_checkpoint(policy / "trainer")
    return [sequence for step in progress.groups for sequence in step]


@pytest.fixture(scope="module")
def synchronous(inputs, local_ray, tmp_path_factory):
    """A synchronous run that nothing disturbs: metrics, policy, report."""
    return run_stage(inputs, tmp_path_factory.mktemp("synchronous"), max_staleness=0)


@pytest.fixture(scope="module")
def asynchronous(inputs, local_ray, tmp_path_factory):
    """An asynchronous run with speculation: metrics, policy, report, tracker."""
    tracker = Recorder()
    folder = tmp_path_factory.mktemp("asynchronous")
    return (*run_stage(inputs, folder, tracker, max_staleness=1), tracker)


def test_the_policy_is_a_model_with_the_same_head_and_other_layers(inputs, asynchronous):
    _, policy, _, _ = asynchronous
    backbone, head, meta = load_model(policy)
    before, head_before, meta_before = load_model(inputs["model"])
    assert hash_tensors(head_tensors(head)) == hash_tensors(head_tensors(head_before))
    assert meta == meta_before
    old = dict(before.model.named_parameters())
    changed = {n for n, p in backbone.model.named_parameters() if not p.equal(old[n])}
    assert changed
    assert all(name.startswith("model.layers.1.") for name in changed)
    assert json.loads((policy / "provenance.json").read_text())["stage"] == "grpo"


def test_every_step_is_logged_with_its_number(asynchronous):
    metrics, _, _, tracker = asynchronous
    assert [step for step, _ in tracker.rows] == list(range(1, STEPS + 1))
    for _, row in tracker.rows:
        assert {"reward/mean", "entropy/target", "accept/length", "accept/decoded_length"} <= set(
            row
        )
        assert {"accept/alpha_1", "accept/decoded_alpha_1", "staleness/mean"} <= set(row)
        assert row["length/response"] >= 1
    assert metrics["train/steps"] == STEPS
    assert {"reward/gain", "reward/eval_before", "reward/eval_after"} <= set(metrics)
    assert not unknown_metrics(list(metrics))


def test_asynchronous_tokens_are_stale_within_the_bound(asynchronous):
    _, policy, _, tracker = asynchronous
    staleness = [row["staleness/max"] for _, row in tracker.rows]
    assert staleness[0] == 0
    assert max(staleness) == 1
    assert trained_groups(policy) == list(range(STEPS * PROMPTS))


def test_the_report_stands_alone(asynchronous):
    _, _, report, _ = asynchronous
    page = report.read_text()
    assert page.count("<svg") >= 5
    assert "Rollouts speculated: rejection, gamma 2 (the diagnosis recommends it)" in page
    assert "<script src" not in page


def test_synchronous_runs_are_equal_bit_by_bit(inputs, local_ray, synchronous, tmp_path):
    metrics, policy, _ = synchronous
    again, policy_again, _ = run_stage(inputs, tmp_path, max_staleness=0)
    assert policy_hash(policy_again) == policy_hash(policy)
    timeless = {name for name in metrics if not name.startswith("perf/")}
    assert {n: metrics[n] for n in timeless} == {n: again[n] for n in timeless}
    assert metrics["staleness/max"] == 0
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-3)


def kill_worker(step):
    """SIGKILL the rollout worker after the second step."""
    if step == 2:
        family = psutil.Process().children(recursive=True)
        workers = [p for p in family if "RolloutWorker" in " ".join(p.cmdline())]
        assert len(workers) == 1
        os.kill(workers[0].pid, signal.SIGKILL)


def test_a_killed_worker_is_replaced_and_nothing_is_lost_or_counted_twice(
    inputs, local_ray, synchronous, tmp_path
):
    metrics, policy, _ = run_stage(inputs, tmp_path, Recorder(kill_worker), max_staleness=0)
    assert metrics["groups/requeued"] == PROMPTS
    assert trained_groups(policy) == list(range(STEPS * PROMPTS))
    assert policy_hash(policy) == policy_hash(synchronous[1])


def test_without_speculation_acceptance_is_probed_all_the_same(inputs, local_ray, tmp_path):
    tracker = Recorder()
    changes = {"speculation": "off", "steps": 1, "eval_prompts": 0}
    run_stage(inputs, tmp_path, tracker, **changes)
    ((_, row),) = tracker.rows
    assert row["accept/alpha_1"] > 0
    assert "accept/decoded_length" not in row


class Stopped(Exception):
    """Ends a run from its tracker, as a failure in mid-run would."""


def stop_at(last):
    def stop(step):
        if step == last:
            raise Stopped

    return stop


def test_a_resumed_run_ends_with_the_bits_of_an_undisturbed_one(
    inputs, local_ray, synchronous, tmp_path, capsys
):
    kept = tmp_path / "checkpoints"
    with pytest.raises(Stopped):
        run_stage(inputs, tmp_path, Recorder(stop_at(4)), kept, max_staleness=0)
    assert [path.name for path in kept.iterdir()] == ["step-000002"]
    assert not (tmp_path / "policy").exists()
    tracker = Recorder()
    metrics, policy, _ = run_stage(inputs, tmp_path, tracker, kept, max_staleness=0)
    assert "resuming at step 2" in capsys.readouterr().err
    assert [step for step, _ in tracker.rows] == [3, 4, 5]
    assert policy_hash(policy) == policy_hash(synchronous[1])
    assert trained_groups(policy) == list(range(STEPS * PROMPTS))
    assert metrics["reward/mean"] == synchronous[0]["reward/mean"]
    assert metrics["reward/eval_before"] == synchronous[0]["reward/eval_before"]
    assert list(kept.iterdir()) == []


def command(inputs, output: Path) -> list[str]:
    options = {**SETTINGS, "steps": 30, "max_staleness": 1, "eval_prompts": 0}
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    paths = [f"--{name}={path}" for name, path in inputs.items()]
    return [sys.executable, "-m", "bebop.grpo", *arguments, *paths, "-o", str(output)]


def test_a_stage_killed_by_sigkill_goes_on_from_its_checkpoint(inputs, tmp_path):
    environment = {**os.environ, "BEBOP_RUN_DIR": str(tmp_path / "run")}
    kept = tmp_path / "run" / "grpo" / "checkpoints"
    output = tmp_path / "out"
    process = subprocess.Popen(command(inputs, output), env=environment)
    while not (kept.is_dir() and any(p.name.startswith("step-") for p in kept.iterdir())):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not output.exists() or not any(output.iterdir())
    result = subprocess.run(
        command(inputs, output), env=environment, capture_output=True, text=True, check=True
    )
    assert "resuming at step" in result.stderr
    assert trained_groups(output / "policy") == list(range(30 * PROMPTS))
    record = json.loads((tmp_path / "run" / "grpo" / "stage.json").read_text())
    assert record["status"] == "succeeded"
    assert record["metrics"]["train/steps"] == 30
    load_model(output / "policy")


def changed_manifest(inputs, folder: Path, **changes) -> dict[str, Path]:
    """The inputs with another manifest."""
    dataset = folder / "dataset"
    dataset.mkdir()
    (dataset / "prompts").symlink_to(inputs["dataset"] / "prompts")
    manifest = json.loads((inputs["dataset"] / "manifest.json").read_text())
    manifest["sampling"].update(changes)
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    return {**inputs, "dataset": dataset}


def test_greedy_sampling_is_refused(inputs, tmp_path):
    with pytest.raises(InputError, match="sampled greedily"):
        run_stage(changed_manifest(inputs, tmp_path, temperature=0.0), tmp_path)
    assert not (tmp_path / "policy").exists()


def test_a_diagnosis_without_a_recommendation_is_refused(inputs, tmp_path):
    diagnosis = write_diagnosis(tmp_path / "diagnosis")
    (diagnosis / "diagnosis.json").write_text('{"version": 1}')
    with pytest.raises(ArtifactError, match="no recommendation"):
        run_stage({**inputs, "diagnosis": diagnosis}, tmp_path)


def test_too_many_layers_are_refused(inputs, local_ray, tmp_path):
    with pytest.raises(StageError, match="the backbone has 2 layers"):
        run_stage(inputs, tmp_path, train_layers=9)
