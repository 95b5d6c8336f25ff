"""The real graph on the `tiny` profile: a whole run, then a run that is killed twice.

One whole run is shared by all tests of this module; the kill tests take up its artifacts.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workflows.stages import CONTRACTS, STAGES

ROOT = Path(__file__).parents[2]
KILL_WITHIN_SECONDS = 240


def command(runs_dir: Path, *arguments: str) -> list[str]:
    return [sys.executable, "pipeline.py", *arguments, "--runs-dir", str(runs_dir)]


def environment() -> dict[str, str]:
    """Without MLflow's variables of whoever runs the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}


def run_pipeline(runs_dir: Path, *arguments: str) -> tuple[Path, str]:
    """Run to the end; the newest run's folder and what was printed."""
    result = subprocess.run(
        command(runs_dir, *arguments),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return newest(runs_dir), result.stdout


def newest(runs_dir: Path) -> Path:
    return max(runs_dir.glob("*-tiny*"), key=lambda folder: folder.stat().st_mtime_ns)


def kill_in_stage(runs_dir: Path, stage: str, *arguments: str) -> Path:
    """Start a run, SIGKILL its runner once `stage` has a checkpoint, and return its folder."""
    known = set(runs_dir.glob("*-tiny*"))
    with (runs_dir / f"killed-{stage}.txt").open("w") as output:
        runner = subprocess.Popen(
            command(runs_dir, *arguments), cwd=ROOT, env=environment(), stdout=output, stderr=output
        )
        try:
            folder = _await_checkpoint(runs_dir, known, stage, runner)
        finally:
            runner.send_signal(signal.SIGKILL)
            runner.wait()
    return folder


def _await_checkpoint(runs_dir: Path, known: set[Path], stage: str, runner) -> Path:
    deadline = time.monotonic() + KILL_WITHIN_SECONDS
    while time.monotonic() < deadline:
        assert runner.poll() is None, f"the run ended before {stage} wrote a checkpoint"
        for folder in set(runs_dir.glob("*-tiny*")) - known:
            # A dot marks a checkpoint that is still being written.
            if any((folder / stage / "checkpoints").glob("[!.]*")):
                return folder
        time.sleep(0.05)
    raise AssertionError(f"{stage} wrote no checkpoint")


def record(folder: Path, stage: str) -> dict:
    return json.loads((folder / stage / "stage.json").read_text())


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole_run(runs_dir):
    """Folder and output of one whole run."""
    return run_pipeline(runs_dir, "run", "--profile", "tiny")


def test_the_summary_holds_all_five_stages(whole_run):
    folder, _ = whole_run
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["stages"]) == list(STAGES)
    for stage, result in summary["stages"].items():
        assert result["status"] == "succeeded"
        assert result["seconds"] > 0
        assert result["metrics"]
        assert all(math.isfinite(value) for value in result["metrics"].values())
        assert set(CONTRACTS[stage].headline) <= set(result["metrics"]), stage
        assert set(result["inputs"]) == set(CONTRACTS[stage].inputs)
        assert set(result["outputs"]) == {*CONTRACTS[stage].outputs, "report"}
        for artifact in (*result["inputs"].values(), *result["outputs"].values()):
            assert artifact["hash"].startswith("sha256:")
            assert Path(artifact["path"]).exists()


def test_what_a_stage_reads_is_what_another_wrote(whole_run):
    folder, _ = whole_run
    written = {
        name: artifact["hash"]
        for stage in STAGES
        for name, artifact in record(folder, stage)["outputs"].items()
    }
    for stage in STAGES:
        for name, artifact in record(folder, stage)["inputs"].items():
            assert artifact["hash"] == written[name]


def test_the_output_says_where_to_look(whole_run):
    folder, printed = whole_run
    for stage in STAGES:
        report = folder / stage / "report.html"
        assert str(report) in printed
        page = report.read_text()
        assert "<svg" in page
        assert 'src="http' not in page
    assert "mlflow ui" in printed


def test_every_artifact_says_where_it_came_from(whole_run):
    folder, _ = whole_run
    for stage in STAGES:
        for name in CONTRACTS[stage].outputs:
            provenance = json.loads((folder / stage / name / "provenance.json").read_text())
            assert provenance["stage"] == stage
            assert set(provenance["inputs"]) == set(CONTRACTS[stage].inputs)
            assert provenance["packages"]["torch"].startswith("2.13.0")


def test_mlflow_has_one_parent_and_five_children(whole_run):
    from mlflow import MlflowClient

    folder, _ = whole_run
    request = json.loads((folder / "run.json").read_text())
    client = MlflowClient(tracking_uri=request["mlflow"]["uri"])
    parent = client.get_run(request["mlflow"]["parent"])
    query = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    children = client.search_runs([parent.info.experiment_id], query)
    assert {child.data.tags["bebop.stage"] for child in children} == set(STAGES)
    assert {run.info.status for run in (parent, *children)} == {"FINISHED"}
    for child in children:
        stage = child.data.tags["bebop.stage"]
        tags, own = child.data.tags, record(folder, stage)
        assert tags["bebop.pipeline_run_id"] == folder.name
        assert tags["bebop.profile"] == "tiny"
        assert tags["bebop.git_sha"] == own["git_sha"]
        for side in ("input", "output"):
            for name, artifact in own[f"{side}s"].items():
                assert tags[f"bebop.{side}.{name}.hash"] == artifact["hash"]
                assert tags[f"bebop.{side}.{name}.uri"] == artifact["path"]
        for name in CONTRACTS[stage].inputs:
            assert tags[f"bebop.input.{name}.run_id"] in {c.info.run_id for c in children}
        assert child.data.params[f"{stage}.seed"] == str(own["config"]["seed"])
        assert set(own["metrics"]) <= set(child.data.metrics)
        assert [f.path for f in client.list_artifacts(child.info.run_id)] == ["report.html"]


def test_mlflow_has_curves_of_training_and_of_reinforcement_learning(whole_run):
    from mlflow import MlflowClient

    folder, _ = whole_run
    mlflow = json.loads((folder / "run.json").read_text())["mlflow"]
    client = MlflowClient(tracking_uri=mlflow["uri"])
    for stage, name in [
        ("mtp_sft", "loss/train"),
        ("mtp_sft", "accept/alpha_1"),
        ("grpo", "reward/mean"),
        ("grpo", "entropy/target"),
        ("grpo", "accept/length"),
    ]:
        history = client.get_metric_history(mlflow["children"][stage], name)
        assert len({point.step for point in history}) >= 2, (stage, name)


def test_a_run_killed_in_two_stages_goes_on_from_its_checkpoints(runs_dir, whole_run):
    whole, _ = whole_run
    first = kill_in_stage(runs_dir, "mtp_sft", "rerun", "mtp_sft", "--run", whole.name)
    assert record(first, "mtp_sft")["status"] == "running"

    second = kill_in_stage(runs_dir, "grpo", "rerun", "mtp_sft", "--run", first.name)
    assert record(second, "data_prep")["reused_from"] == whole.name
    assert record(second, "mtp_sft")["status"] == "succeeded"
    assert "resum" in (second / "log.txt").read_text()

    third, _ = run_pipeline(runs_dir, "rerun", "grpo", "--run", second.name)
    statuses = [record(third, stage)["status"] for stage in STAGES]
    assert statuses == ["reused", "reused", "reused", "succeeded", "succeeded"]
    assert "resum" in (third / "log.txt").read_text()
    wanted = record(second, "mtp_sft")["outputs"]["model"]["hash"]
    assert record(third, "grpo")["inputs"]["model"]["hash"] == wanted
    _assert_no_open_mlflow_runs(runs_dir)


def _assert_no_open_mlflow_runs(runs_dir: Path) -> None:
    """The reruns ended what the killed runners had left open."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{runs_dir / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("bebop")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.status for run in runs} <= {"FINISHED", "KILLED", "FAILED"}


def test_a_bad_key_ends_before_anything_runs(runs_dir):
    before = set(runs_dir.iterdir())
    result = subprocess.run(
        command(runs_dir, "run", "--profile", "tiny", "--set", "grpo.stepz=3"),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "stepz: unknown key" in result.stderr
    assert "Traceback" not in result.stderr
    assert set(runs_dir.iterdir()) == before


def test_a_model_that_is_not_there_fails_the_run_with_one_message(runs_dir):
    result = subprocess.run(
        command(runs_dir, "run", "--profile", "tiny", "--set", "data_prep.model=/no/such/model"),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "/no/such/model" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    summary = json.loads((newest(runs_dir) / "summary.json").read_text())
    assert summary["stages"]["data_prep"]["status"] == "failed"
    assert summary["stages"]["grpo"]["status"] == "not run"
