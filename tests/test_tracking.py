"""Tracking against a real store: what is written, and what happens while the store is away."""

import json
import math
import os

import pytest

from bebop import tracking
from bebop.errors import StageError
from bebop.tracking import (
    NO_TRACKING,
    PARENT_TAG,
    MlflowTracker,
    close_dead_run,
    close_pipeline_run,
    make_client,
    open_pipeline_run,
    open_tracker,
)

CLOSED = "http://127.0.0.1:9"  # the discard port: nothing listens there
STAGES = ["data_prep", "mtp_sft"]


@pytest.fixture
def client(tracking_uri):
    return make_client(tracking_uri)


@pytest.fixture
def run_id(client):
    experiment = client.get_experiment_by_name("bebop").experiment_id
    return client.create_run(experiment, run_name="test").info.run_id


@pytest.fixture
def tracker(client, run_id, tmp_path):
    return MlflowTracker(lambda: client, run_id, tmp_path / "spool.jsonl")


@pytest.fixture
def away(run_id, tmp_path, monkeypatch):
    """A tracker of the same run whose store cannot be reached; it retries at every call."""
    monkeypatch.setattr(tracking, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr(tracking, "RETRIES", 1)
    return MlflowTracker(lambda: make_client(CLOSED), run_id, tmp_path / "spool.jsonl")


def history(client, run_id, name):
    return [(m.step, m.value) for m in client.get_metric_history(run_id, name)]


# --- what is written


def test_metrics_are_kept_by_step(tracker, client):
    for step in range(3):
        tracker.log({"reward/mean": step / 2, "entropy/target": 2.0 - step}, step=step)
    assert history(client, tracker.run_id, "reward/mean") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert history(client, tracker.run_id, "entropy/target") == [(0, 2.0), (1, 1.0), (2, 0.0)]


def test_values_that_are_not_finite_are_left_out_and_said(tracker, client, capsys):
    tracker.log({"loss/train": math.nan, "loss/kl": math.inf, "loss/tv": 0.5})
    assert client.get_run(tracker.run_id).data.metrics == {"loss/tv": 0.5}
    assert "not finite: loss/kl, loss/train" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["mlflow", "none"])
def test_names_without_a_definition_are_refused(tracker, kind):
    with pytest.raises(ValueError, match="reward/average"):
        (tracker if kind == "mlflow" else NO_TRACKING).log({"reward/average": 1.0})


def test_params_tags_and_artifacts_arrive(tracker, client, tmp_path):
    report = tmp_path / "report.html"
    report.write_text("<p>hello</p>")
    tracker.params({"mtp_sft.steps": 3, "mtp_sft.loss": "kl"})
    tracker.tags({"bebop.stage": "mtp_sft"})
    tracker.artifact(report)
    data = client.get_run(tracker.run_id).data
    assert data.params == {"mtp_sft.steps": "3", "mtp_sft.loss": "kl"}
    assert data.tags["bebop.stage"] == "mtp_sft"
    assert [f.path for f in client.list_artifacts(tracker.run_id)] == ["report.html"]


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_finish_ends_the_run(tracker, client, status):
    tracker.finish(status)
    assert client.get_run(tracker.run_id).info.status == status


# --- runs of a pipeline


def test_pipeline_run_has_a_parent_and_scheduled_children(client, tracking_uri, tmp_path):
    tags = {"bebop.profile": "tiny"}
    experiment, parent, children = open_pipeline_run(tracking_uri, tmp_path, "r1", STAGES, tags)
    assert list(children) == STAGES
    for stage, child in children.items():
        run = client.get_run(child)
        assert run.data.tags[PARENT_TAG] == parent
        assert run.data.tags["bebop.stage"] == stage
        assert run.data.tags["bebop.profile"] == "tiny"
        assert run.info.status == "SCHEDULED"
        assert run.info.experiment_id == experiment
    assert client.get_run(parent).data.tags["bebop.profile"] == "tiny"


def test_closing_copies_metrics_and_keeps_how_stages_ended(client, tracking_uri, tmp_path):
    _, parent, children = open_pipeline_run(tracking_uri, tmp_path, "r2", STAGES, {})
    client.set_terminated(children["data_prep"], "FINISHED")
    close_pipeline_run(tracking_uri, parent, children, {"reward/mean": 0.5}, "FAILED")
    assert client.get_run(parent).info.status == "FAILED"
    assert client.get_run(parent).data.metrics == {"reward/mean": 0.5}
    assert client.get_run(children["data_prep"]).info.status == "FINISHED"
    assert client.get_run(children["mtp_sft"]).info.status == "KILLED"


def test_dead_run_is_ended_once(client, tracking_uri, tmp_path):
    _, parent, children = open_pipeline_run(tracking_uri, tmp_path, "r3", STAGES, {})
    close_dead_run(tracking_uri, parent, children)
    assert {client.get_run(r).info.status for r in (parent, *children.values())} == {"KILLED"}


def test_closing_an_unreachable_store_is_reported_not_raised(capsys):
    close_pipeline_run(CLOSED, "abc", {}, {}, "FINISHED")
    assert "MLflow is away" in capsys.readouterr().err


def test_opening_a_pipeline_run_in_an_unreachable_store_says_what_to_do(tmp_path):
    with pytest.raises(StageError, match=r"MLFLOW_TRACKING_URI=http.*unset MLFLOW_TRACKING_URI"):
        open_pipeline_run(CLOSED, tmp_path, "r4", STAGES, {})


# --- a stage's own run


def test_without_an_address_nothing_is_tracked():
    assert open_tracker("grpo") is NO_TRACKING


def test_stage_resumes_the_run_it_is_given_and_hides_it_from_workers(
    client, run_id, tracking_uri, monkeypatch
):
    client.update_run(run_id, status="SCHEDULED")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    tracker = open_tracker("grpo")
    assert tracker.run_id == run_id
    assert "MLFLOW_RUN_ID" not in os.environ
    assert client.get_run(run_id).info.status == "RUNNING"
    assert client.get_run(run_id).data.tags["bebop.stage"] == "grpo"


def test_stage_without_a_run_makes_one(client, tracking_uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
    run = client.get_run(open_tracker("grpo").run_id)
    assert run.info.run_name == "grpo"
    assert client.get_experiment(run.info.experiment_id).name == "bebop"


def test_stage_without_a_run_and_without_a_store_fails_before_it_computes(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", CLOSED)
    with pytest.raises(StageError, match="cannot be used"):
        open_tracker("grpo")


def test_stage_with_a_run_goes_on_without_the_store(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tracking, "RETRIES", 1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", CLOSED)
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    tracker = open_tracker("grpo", tmp_path)
    tracker.log({"reward/mean": 1.0}, step=1)
    assert capsys.readouterr().err.count("MLflow is away") == 1
    kinds = [json.loads(line)[0] for line in tracker.spool.read_text().splitlines()]
    assert kinds == ["resume", "tags", "log"]


# --- a store that is away


def test_spooled_calls_are_replayed_in_order_when_the_store_returns(
    away, tracker, client, tmp_path
):
    report = tmp_path / "report.html"
    report.write_text("x")
    away.params({"grpo.steps": 2})
    away.log({"reward/mean": 0.25}, step=1)
    away.log({"reward/mean": 0.5}, step=2)
    away.tags({"bebop.profile": "tiny"})
    away.artifact(report)
    away.finish("FINISHED")
    assert client.get_run(away.run_id).data.metrics == {}
    assert away.spool == tracker.spool
    tracker.log({"reward/mean": 0.75}, step=3)
    run = client.get_run(tracker.run_id)
    assert history(client, tracker.run_id, "reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.data.params == {"grpo.steps": "2"}
    assert run.data.tags["bebop.profile"] == "tiny"
    assert run.info.status == "FINISHED"
    assert not tracker.spool.exists()


def test_store_that_appears_later_is_found(run_id, tracking_uri, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr(tracking, "RETRIES", 1)
    link = tmp_path / "store"
    link.write_text("a file where the folder should be")
    tracker = MlflowTracker(
        lambda: make_client(f"sqlite:///{link}/mlflow.db"), run_id, tmp_path / "spool.jsonl"
    )
    tracker.log({"reward/mean": 0.25}, step=1)
    assert tracker.spool.exists()
    link.unlink()
    link.symlink_to(os.path.dirname(tracking_uri.removeprefix("sqlite:///")))
    tracker.log({"reward/mean": 0.5}, step=2)
    assert history(make_client(tracking_uri), run_id, "reward/mean") == [(1, 0.25), (2, 0.5)]
    assert not tracker.spool.exists()


def test_store_is_not_asked_again_at_every_call(away, monkeypatch, capsys):
    monkeypatch.setattr(tracking, "AWAY_SECONDS", 60.0)
    for step in range(5):
        away.log({"reward/mean": 1.0}, step=step)
    assert capsys.readouterr().err.count("MLflow is away") == 1
    assert len(away.spool.read_text().splitlines()) == 5


def test_finish_is_tried_even_when_the_store_was_just_away(tracker, client):
    tracker._away_until = math.inf
    tracker.log({"reward/mean": 1.0}, step=1)
    assert client.get_run(tracker.run_id).data.metrics == {}
    tracker.finish("FINISHED")
    assert client.get_run(tracker.run_id).data.metrics == {"reward/mean": 1.0}
    assert client.get_run(tracker.run_id).info.status == "FINISHED"


def test_line_that_a_kill_cut_short_is_dropped(tracker, client):
    whole = json.dumps(["log", [["reward/mean", 0.25, 1, 1]]]) + "\n"
    tracker.spool.write_text(whole + whole[:20])
    tracker.tags({"bebop.profile": "tiny"})
    assert history(client, tracker.run_id, "reward/mean") == [(1, 0.25)]


def test_refused_call_is_said_and_does_not_block_the_next(tracker, client, capsys):
    tracker.params({"grpo.steps": 2})
    tracker.params({"grpo.steps": 3})
    tracker.artifact(tracker.spool.with_name("never_written.html"))
    tracker.log({"reward/mean": 0.5}, step=1)
    said = capsys.readouterr().err
    assert "MLflow refused params" in said
    assert "MLflow refused artifact" in said
    assert client.get_run(tracker.run_id).data.params == {"grpo.steps": "2"}
    assert history(client, tracker.run_id, "reward/mean") == [(1, 0.5)]
    assert not tracker.spool.exists()


def test_spool_without_a_disk_is_said_and_the_stage_goes_on(away, capsys):
    away.spool.mkdir()
    away.log({"reward/mean": 1.0}, step=1)
    assert "log is lost to MLflow" in capsys.readouterr().err
