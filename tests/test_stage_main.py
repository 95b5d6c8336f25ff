"""How a stage ends is on record, whatever ended it."""

import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kfp import dsl
from pydantic import Field

from bebop.config import StageConfig
from bebop.errors import ConfigError, InputError, StageError
from bebop.provenance import hash_path
from bebop.stage_main import checked_input, kfp_task, run_stage, user_errors
from bebop.tracking import make_client


class Config(StageConfig):
    """A config like a stage's."""

    steps: int = Field(3, description="Steps.")


Config.__module__ = "bebop.mtp_sft.stage"


@pytest.fixture
def dataset(tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "rows.txt").write_text("1 2 3")
    return folder


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "r1"
    monkeypatch.setenv("BEBOP_RUN_DIR", str(folder))
    return folder


def work(config, *, dataset, model, report, tracker, checkpoints):
    """A small real stage: reads its input, writes its outputs, tracks and reports."""
    rows = (dataset / "rows.txt").read_text().split()
    model.mkdir(parents=True, exist_ok=True)
    (model / "sum.txt").write_text(str(sum(map(int, rows)) * config.steps))
    report.write_text("<p>done</p>")
    tracker.log({"loss/train": 0.5}, step=1)
    return {"accept/length": 2.0, "loss/kl": float("nan")}


def call(run, dataset, tmp_path, config=None):
    outputs = {"model": tmp_path / "out" / "model", "report": tmp_path / "out" / "report.html"}
    (tmp_path / "out").mkdir(exist_ok=True)
    return run_stage(config or Config(), run, inputs={"dataset": dataset}, outputs=outputs)


def saved(run_dir):
    return json.loads((run_dir / "mtp_sft" / "stage.json").read_text())


def test_success_is_recorded_with_hashes_and_finite_metrics(dataset, tmp_path, run_dir):
    record = call(work, dataset, tmp_path, Config(steps=2, seed=7))
    assert record == saved(run_dir)
    assert record["status"] == "succeeded"
    assert record["config"] == {"steps": 2, "seed": 7, "threads": 0}
    assert record["metrics"]["accept/length"] == 2.0
    assert record["metrics"]["perf/peak_rss_mib"] > 1
    assert record["metrics_not_finite"] == ["loss/kl"]
    assert record["inputs"]["dataset"]["hash"] == hash_path(dataset)
    model = tmp_path / "out" / "model"
    assert record["outputs"]["model"] == {"path": str(model), "hash": hash_path(model)}
    assert 0 < record["seconds"] < 60


def test_outputs_are_linked_into_the_stage_folder(dataset, tmp_path, run_dir):
    call(work, dataset, tmp_path)
    call(work, dataset, tmp_path)
    assert (run_dir / "mtp_sft" / "model" / "sum.txt").read_text() == "18"
    assert (run_dir / "mtp_sft" / "report.html").read_text() == "<p>done</p>"
    metrics = json.loads((tmp_path / "out" / "report.html.metrics.json").read_text())
    assert metrics["accept/length"] == 2.0


def test_record_says_running_while_the_stage_runs(dataset, tmp_path, run_dir):
    seen = []

    def look(config, **paths):
        seen.append((saved(run_dir)["status"], paths["checkpoints"]))
        return work(config, **paths)

    call(look, dataset, tmp_path)
    assert seen == [("running", run_dir / "mtp_sft" / "checkpoints")]


def test_without_a_run_folder_nothing_is_kept_but_the_record_returned(dataset, tmp_path):
    record = call(work, dataset, tmp_path)
    assert record["status"] == "succeeded"
    assert sorted(os.listdir(tmp_path)) == ["dataset", "out"]


@pytest.mark.parametrize(
    ("error", "raised", "status", "said"),
    [
        (InputError("bad", where="x", fix="mend it"), InputError, "failed", "bad (x). mend it."),
        (OSError(errno.ENOSPC, "full"), StageError, "failed", "the disk is full"),
        (OSError(errno.EIO, "broken"), OSError, "failed", None),
        (ZeroDivisionError(), ZeroDivisionError, "failed", None),
        (KeyboardInterrupt(), KeyboardInterrupt, "interrupted", None),
    ],
)
def test_failures_are_recorded(dataset, tmp_path, run_dir, error, raised, status, said):
    def fail(config, **paths):
        raise error

    with pytest.raises(raised):
        call(fail, dataset, tmp_path)
    record = saved(run_dir)
    assert record["status"] == status
    assert record.get("error") == said
    assert record["outputs"] == {}


def test_a_pipe_that_breaks_during_an_interrupt_is_still_an_interrupt(dataset, tmp_path, run_dir):
    def fail(config, **paths):
        try:
            raise KeyboardInterrupt
        finally:
            raise BrokenPipeError(errno.EPIPE, "nobody reads the last progress line")

    with pytest.raises(KeyboardInterrupt):
        call(fail, dataset, tmp_path)
    assert saved(run_dir)["status"] == "interrupted"


def test_real_full_disk_is_one_message(dataset, tmp_path, run_dir):
    def fill(config, **paths):
        with open("/dev/full", "w") as stream:
            stream.write("x")

    with pytest.raises(StageError, match=r"the disk is full \(.*\)\. Free some space"):
        call(fill, dataset, tmp_path)
    assert saved(run_dir)["error"] == "the disk is full"


def test_metric_without_a_definition_fails_the_stage(dataset, tmp_path, run_dir):
    def invent(config, **paths):
        return {**work(config, **paths), "loss/invented": 1.0}

    with pytest.raises(StageError, match="loss/invented"):
        call(invent, dataset, tmp_path)
    assert saved(run_dir)["status"] == "failed"


def test_output_that_was_not_written_fails_the_stage(dataset, tmp_path, run_dir):
    with pytest.raises(Exception, match="missing"):
        call(lambda config, **paths: {}, dataset, tmp_path)
    assert saved(run_dir)["status"] == "failed"


# --- the same in MLflow


@pytest.fixture
def child(tracking_uri, monkeypatch):
    client = make_client(tracking_uri)
    experiment = client.get_experiment_by_name("bebop").experiment_id
    run_id = client.create_run(experiment).info.run_id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    return client, run_id


def test_mlflow_run_holds_params_metrics_identity_and_report(
    dataset, tmp_path, run_dir, child, monkeypatch
):
    monkeypatch.setenv("BEBOP_PIPELINE_RUN_ID", "r1")
    monkeypatch.setenv("BEBOP_PROFILE", "tiny")
    client, run_id = child
    record = call(work, dataset, tmp_path)
    run = client.get_run(run_id)
    assert record["mlflow_run_id"] == run_id
    assert run.info.status == "FINISHED"
    assert run.data.params["mtp_sft.steps"] == "3"
    assert run.data.metrics["accept/length"] == 2.0
    assert run.data.metrics["loss/train"] == 0.5
    tags = run.data.tags
    assert tags["bebop.stage"] == "mtp_sft"
    assert tags["bebop.pipeline_run_id"] == "r1"
    assert tags["bebop.profile"] == "tiny"
    assert tags["bebop.git_sha"] == record["git_sha"]
    for kind, name in (("input", "dataset"), ("output", "model"), ("output", "report")):
        artifact = record[f"{kind}s"][name]
        assert tags[f"bebop.{kind}.{name}.uri"] == artifact["path"]
        assert tags[f"bebop.{kind}.{name}.hash"] == artifact["hash"]
    assert [f.path for f in client.list_artifacts(run_id)] == ["report.html"]


@pytest.mark.parametrize(
    ("error", "status"), [(InputError("bad"), "FAILED"), (KeyboardInterrupt(), "KILLED")]
)
def test_mlflow_run_ends_as_the_stage_does(dataset, tmp_path, run_dir, child, error, status):
    def fail(config, **paths):
        raise error

    with pytest.raises(type(error)):
        call(fail, dataset, tmp_path)
    client, run_id = child
    assert client.get_run(run_id).info.status == status


# --- called by Kubeflow


def artifacts(tmp_path, dataset):
    made = tmp_path / "kfp"
    made.mkdir()
    source = dsl.Dataset(uri=str(dataset), metadata={"mlflow_run_id": "run-of-data-prep"})
    outputs = {
        "model": dsl.Model(uri=str(made / "model")),
        "report": dsl.HTML(uri=str(made / "report")),
    }
    return {"dataset": source}, outputs, dsl.Metrics(uri=str(made / "metrics"))


def test_kfp_artifacts_carry_hash_run_id_and_metrics(dataset, tmp_path, run_dir, child):
    inputs, outputs, metrics = artifacts(tmp_path, dataset)
    values = kfp_task(
        Config, work, '{"steps": 2.0}', inputs=inputs, outputs=outputs, metrics=metrics
    )
    client, run_id = child
    model = tmp_path / "kfp" / "model"
    assert (model / "sum.txt").read_text() == "12"
    assert outputs["model"].metadata == {"hash": hash_path(model), "mlflow_run_id": run_id}
    assert metrics.metadata["accept/length"] == 2.0
    assert json.loads(Path(metrics.path).read_text()) == values
    assert client.get_run(run_id).data.tags["bebop.input.dataset.run_id"] == "run-of-data-prep"
    assert [f.path for f in client.list_artifacts(run_id)] == ["report.html"]


def test_kfp_failure_is_one_message_and_exit_code_1(dataset, tmp_path, capsys):
    inputs, outputs, metrics = artifacts(tmp_path, dataset)
    with pytest.raises(SystemExit) as caught:
        kfp_task(Config, work, '{"stepz": 2}', inputs=inputs, outputs=outputs, metrics=metrics)
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert "error: invalid config of mtp_sft: stepz: unknown key" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("bad key", where="a.b", fix="mend it"), 1, "error: bad key (a.b). mend it."),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_users_get_a_sentence(capsys, error, code, said):
    with pytest.raises(SystemExit) as caught, user_errors():
        raise error
    assert caught.value.code == code
    assert said in capsys.readouterr().err


def test_bugs_keep_their_traceback():
    with pytest.raises(ZeroDivisionError), user_errors():
        _ = 1 / 0


def test_missing_input_names_the_option(tmp_path):
    assert checked_input("dataset", tmp_path) == tmp_path
    with pytest.raises(InputError, match=r"no dataset there \(.*gone\)\. Pass --dataset PATH"):
        checked_input("dataset", tmp_path / "gone")


# --- with nothing left

FULL = """
import sys
from pathlib import Path
from pydantic import Field
from bebop.config import StageConfig
from bebop.stage_main import run_stage, user_errors

class Config(StageConfig):
    pass

Config.__module__ = "bebop.mtp_sft.stage"

def run(config, *, model, tracker, checkpoints):
    model.write_bytes(bytes(10**6))

with user_errors():
    run_stage(Config(), run, inputs={}, outputs={"model": Path(sys.argv[1]) / "model"})
"""


def test_disk_without_room_for_the_record_still_says_so(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1)")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=16k tmpfs {disk} && exec {sys.executable} -c '{FULL}' {disk}"
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount]
    env = {**os.environ, "BEBOP_RUN_DIR": str(disk / "run")}
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if "unshare" in result.stderr or "mount:" in result.stderr:
        pytest.skip(f"cannot mount here: {result.stderr.strip()}")
    assert result.returncode == 1, result.stderr
    assert "error: the disk is full" in result.stderr
    assert "Traceback" not in result.stderr


ORPHAN = """
import os, sys, time
from bebop.stage_main import die_with_runner
die_with_runner()
print(os.getpid(), flush=True)
time.sleep(60)
"""
RUNNER = """
import os, subprocess, sys
os.environ["BEBOP_RUNNER_PID"] = str(os.getpid())
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_stage_ends_when_its_runner_is_killed():
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, ORPHAN], stdout=subprocess.PIPE, text=True
    )
    stage = int(runner.stdout.readline())
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    # The stage holds the pipe open for as long as it lives: 60 s, unless it ends with its runner.
    ended, _, _ = select.select([runner.stdout], [], [], 20)
    if not ended:
        os.kill(stage, signal.SIGKILL)
    runner.stdout.close()
    assert ended
