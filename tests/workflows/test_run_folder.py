import json
import shutil

import pytest

from bebop.errors import ArtifactError, InputError
from bebop.provenance import hash_path, write_json
from workflows.profile import load_profile
from workflows.run_folder import (
    new_run_folder,
    open_run,
    record_reused,
    rerun_command,
    stage_record,
    summarize,
    usable_outputs,
    write_request,
)


@pytest.fixture
def run_folder(tmp_path):
    """A run whose `data_prep` finished and whose `mtp_sft` was killed."""
    folder = new_run_folder(tmp_path, "tiny")
    write_request(folder, load_profile("tiny"), ["pipeline.py", "run"])
    dataset = folder / "kfp" / "dataset"
    dataset.mkdir(parents=True)
    (dataset / "rows").write_text("1 2 3")
    outputs = {"dataset": {"path": str(dataset), "hash": hash_path(dataset)}}
    record = {"version": 1, "seconds": 1.5, "metrics": {"loss/kl": 0.1}, "inputs": {}}
    done = {**record, "stage": "data_prep", "status": "succeeded", "outputs": outputs}
    write_json(folder / "data_prep" / "stage.json", done)
    killed = {**record, "stage": "mtp_sft", "status": "running", "outputs": {}}
    write_json(folder / "mtp_sft" / "stage.json", killed)
    return folder


def test_two_runs_in_one_second_get_two_folders(tmp_path):
    assert new_run_folder(tmp_path, "tiny") != new_run_folder(tmp_path, "tiny")


def test_the_summary_tells_finished_killed_and_unstarted_stages_apart(run_folder):
    summary = summarize(run_folder)
    statuses = {stage: record["status"] for stage, record in summary["stages"].items()}
    assert statuses == {
        "data_prep": "succeeded",
        "mtp_sft": "killed",
        "diagnosis": "not run",
        "grpo": "not run",
        "throughput": "not run",
    }
    assert json.loads((run_folder / "summary.json").read_text()) == summary
    assert summary["stages"]["data_prep"]["metrics"] == {"loss/kl": 0.1}


def test_outputs_are_usable_only_while_they_are_unchanged(run_folder):
    outputs = usable_outputs(run_folder, "data_prep")
    assert outputs["dataset"]["hash"].startswith("sha256:")
    (run_folder / "kfp" / "dataset" / "rows").write_text("1 2 4")
    with pytest.raises(ArtifactError, match="dataset has changed"):
        usable_outputs(run_folder, "data_prep")


def test_a_deleted_output_is_missed(run_folder):
    (run_folder / "kfp" / "dataset" / "rows").unlink()
    (run_folder / "kfp" / "dataset").rmdir()
    with pytest.raises(ArtifactError, match=r"dataset is missing .* rerun data_prep --run"):
        usable_outputs(run_folder, "data_prep")


def test_a_killed_stage_has_no_usable_outputs(run_folder):
    with pytest.raises(ArtifactError, match="rerun mtp_sft"):
        usable_outputs(run_folder, "mtp_sft")


def test_a_rerun_of_a_rerun_still_names_the_first_run(run_folder, tmp_path):
    second = new_run_folder(tmp_path, "tiny")
    record_reused(second, run_folder, "data_prep")
    third = new_run_folder(tmp_path, "tiny")
    record_reused(third, second, "data_prep")
    record = stage_record(third, "data_prep")
    assert (record["status"], record["reused_from"]) == ("reused", run_folder.name)
    assert usable_outputs(third, "data_prep") == usable_outputs(run_folder, "data_prep")
    assert (third / "data_prep" / "dataset" / "rows").read_text() == "1 2 3"


def test_an_unknown_run_names_the_latest(run_folder, tmp_path):
    with pytest.raises(InputError, match=run_folder.name):
        open_run(tmp_path, "20200101-000000-tiny")


def test_a_runs_dir_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--runs-dir"):
        new_run_folder(tmp_path / "file", "tiny")


def test_a_copied_run_uses_its_own_artifacts(run_folder, tmp_path):
    copied = tmp_path / "archive" / run_folder.name
    shutil.copytree(run_folder, copied)
    (run_folder / "kfp" / "dataset" / "rows").write_text("changed in the original")
    path = usable_outputs(copied, "data_prep")["dataset"]["path"]
    assert path == str(copied / "kfp" / "dataset")
    (copied / "kfp" / "dataset" / "rows").write_text("changed in the copy")
    with pytest.raises(ArtifactError, match="dataset has changed"):
        usable_outputs(copied, "data_prep")


def test_the_rerun_command_names_the_runs_dir(run_folder, tmp_path, monkeypatch):
    command = rerun_command(run_folder, "grpo")
    assert command.endswith(f"rerun grpo --run {run_folder.name} --runs-dir {tmp_path}")
    monkeypatch.chdir(tmp_path)
    assert rerun_command(tmp_path / "runs" / "r1", "grpo").endswith("rerun grpo --run r1")
