"""Runs the graph on this machine through Kubeflow's own local runner."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kfp import local

from bebop import tracking
from bebop.errors import StageError
from bebop.provenance import link_or_copy
from bebop.stage_main import RUN_DIR, RUNNER_PID, check_device
from workflows.bebop import make_pipeline
from workflows.profile import Profile, load_profile, override_values
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
from workflows.run_log import run_log
from workflows.stages import STAGES, needed_artifacts, stages_from
from workflows.summary_table import print_summary

STAGE_ENDS_WITHIN_SECONDS = 15.0


def run(profile_name: str, overrides: Sequence[str], runs_dir: Path, command: list[str]) -> Path:
    """Run all five stages.

    Args:
        profile_name: name or path of a profile.
        overrides: `STAGE.KEY=VALUE` strings.
        runs_dir: where runs are kept.
        command: the command line, for `run.json`.

    Returns:
        The run's folder.

    Raises:
        BebopError: bad configuration, or a stage that failed (after the summary was written).
    """
    profile = load_profile(profile_name, overrides)
    for config in profile.configs.values():
        check_device(config)
    folder = new_run_folder(runs_dir, profile.name)
    _execute(folder, profile, STAGES, {}, command, {})
    return folder


def rerun(
    stage: str, run_id: str, overrides: Sequence[str], runs_dir: Path, command: list[str]
) -> Path:
    """Run a stage and everything downstream on the recorded upstream artifacts of a run.

    The artifacts are checked by hash. A stage that was killed goes on from its last checkpoint.

    Returns:
        The new run's folder.

    Raises:
        BebopError: unknown run or stage, unusable artifacts, or a stage that failed.
    """
    source, request = open_run(runs_dir, run_id)
    configs = override_values(request["configs"], overrides)
    profile = Profile(request["profile"], configs, request.get("resources", {}))
    stages = stages_from(stage)
    writers = needed_artifacts(stages)
    outputs = {writer: usable_outputs(source, writer) for writer in dict.fromkeys(writers.values())}
    imported = {
        name: _import_source(source, writer, outputs[writer][name])
        for name, writer in writers.items()
    }
    folder = new_run_folder(runs_dir, profile.name)
    for upstream in STAGES[: STAGES.index(stage)]:
        if stage_record(source, upstream) is not None:
            record_reused(folder, source, upstream)
    _take_checkpoints(source, folder, stage)
    _close_dead_run(request)
    link = {"rerun_of": run_id, "from_stage": stage}
    _execute(folder, profile, stages, imported, command, link)
    return folder


def _import_source(source: Path, writer: str, artifact: Mapping[str, Any]) -> dict[str, Any]:
    record = stage_record(source, writer)
    assert record is not None
    metadata = {"hash": artifact["hash"], "mlflow_run_id": record["mlflow_run_id"]}
    return {"uri": artifact["path"], "metadata": metadata}


def _take_checkpoints(source: Path, folder: Path, stage: str) -> None:
    """Carry the checkpoints of a stage that did not finish into the new run."""
    record = stage_record(source, stage)
    checkpoints = source / stage / "checkpoints"
    if record and record["status"] != "succeeded" and checkpoints.is_dir():
        # A leading dot marks what was still being written when the stage was killed.
        whole = shutil.ignore_patterns(".*")
        shutil.copytree(
            checkpoints,
            folder / stage / "checkpoints",
            copy_function=link_or_copy,
            ignore=whole,
        )


def _close_dead_run(request: Mapping[str, Any]) -> None:
    """End the MLflow runs that a killed runner left open."""
    mlflow = request.get("mlflow")
    if mlflow:
        tracking.close_dead_run(mlflow["uri"], mlflow["parent"], mlflow["children"])


def _execute(
    folder: Path,
    profile: Profile,
    stages: tuple[str, ...],
    imported: Mapping[str, Mapping[str, Any]],
    command: list[str],
    link: Mapping[str, str],
) -> None:
    """Write the request, run the graph, write the summary, print the table."""
    print(f"run {folder.name}: opening MLflow, some seconds the first time", flush=True)
    mlflow = _open_tracking(folder, profile, stages, link)
    write_request(folder, profile, command, mlflow=mlflow, stages=list(stages), **link)
    _set_environment(folder, profile, mlflow)
    environment = {stage: {"MLFLOW_RUN_ID": run} for stage, run in mlflow["children"].items()}
    print(" → ".join(stages), flush=True)
    status = "FAILED"
    try:
        _run_graph(folder, profile, stages, imported, environment)
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        # A second Ctrl-C must not lose the summary of what is finished.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        stopped = _await_running_stage(folder, stages)
        summary = summarize(folder)
        _close_tracking(mlflow, summary, status)
        print_summary(folder, summary, mlflow)
        if status == "KILLED" and stopped:
            print(f"to take it up: {rerun_command(folder, stopped)}", flush=True)
        signal.signal(signal.SIGINT, handler)


def _await_running_stage(folder: Path, stages: tuple[str, ...]) -> str:
    """Let an interrupted stage close its record and its workers; it ends with this process.

    Returns:
        The first stage that is not finished; empty when all are.
    """
    deadline = time.monotonic() + STAGE_ENDS_WITHIN_SECONDS
    for stage in stages:
        record = stage_record(folder, stage)
        while record and record["status"] == "running" and time.monotonic() < deadline:
            time.sleep(0.1)
            record = stage_record(folder, stage)
        if record is None or record["status"] != "succeeded":
            return stage
    return ""


def _run_graph(
    folder: Path,
    profile: Profile,
    stages: tuple[str, ...],
    imported: Mapping[str, Mapping[str, Any]],
    environment: Mapping[str, Mapping[str, str]],
) -> None:
    pipeline = make_pipeline(profile, stages, imported=imported, environment=environment)
    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=str(folder / "kfp"),
        raise_on_error=True,
    )
    try:
        with run_log(folder / "log.txt"):
            pipeline()
    except RuntimeError as error:
        # The runner raises this for a task that failed; the stage's own record says why.
        failed = [
            stage
            for stage in stages
            if (record := stage_record(folder, stage)) and record["status"] != "succeeded"
        ]
        if not failed:
            raise
        record = stage_record(folder, failed[0]) or {}
        raise StageError(
            f"{failed[0]} failed: {record.get('error', 'see its output above').rstrip('.')}",
            where=f"log: {folder / 'log.txt'}",
            fix=f"Then: {rerun_command(folder, failed[0])}",
        ) from error


def _open_tracking(
    folder: Path, profile: Profile, stages: tuple[str, ...], link: Mapping[str, str]
) -> dict[str, Any]:
    """Create the parent run and its children in the store that the environment names.

    Default: SQLite and a folder beside the runs, so that nothing needs a server.
    """
    default = f"sqlite:///{folder.parent / 'mlflow.db'}"
    uri = os.environ.get("MLFLOW_TRACKING_URI", default)
    tags = {"bebop.pipeline_run_id": folder.name, "bebop.profile": profile.name}
    tags |= {f"bebop.{name}": value for name, value in link.items()}
    experiment, parent, children = tracking.open_pipeline_run(
        uri, folder.parent / "mlflow-artifacts", folder.name, list(stages), tags
    )
    return {"uri": uri, "experiment": experiment, "parent": parent, "children": children}


def _set_environment(folder: Path, profile: Profile, mlflow: Mapping[str, Any]) -> None:
    """What every stage of this run inherits."""
    os.environ[RUN_DIR] = str(folder)
    os.environ[RUNNER_PID] = str(os.getpid())
    os.environ["BEBOP_PIPELINE_RUN_ID"] = folder.name
    os.environ["BEBOP_PROFILE"] = profile.name
    if mlflow["parent"]:
        os.environ["MLFLOW_TRACKING_URI"] = mlflow["uri"]
        os.environ["MLFLOW_EXPERIMENT_ID"] = mlflow["experiment"]
    if sys.stderr.isatty():
        os.environ["BEBOP_TERMINAL"] = os.ttyname(sys.stderr.fileno())


def _close_tracking(mlflow: Mapping[str, Any], summary: Mapping[str, Any], status: str) -> None:
    # The stage's name in front: several stages report, say, accept/alpha_1.
    metrics = {
        f"{stage}/{name}": value
        for stage, record in summary["stages"].items()
        if record["status"] == "succeeded"
        for name, value in record["metrics"].items()
    }
    if mlflow["parent"]:
        tracking.close_pipeline_run(
            mlflow["uri"], mlflow["parent"], mlflow["children"], metrics, status
        )
