"""How a stage is called: one adapter for the command line and for Kubeflow.

Both resolve the config, open tracking, hash inputs and outputs, call the stage's `run()` and keep
a record. When `pipeline.py` runs the DAG on this machine, `BEBOP_RUN_DIR` names the run's folder
and the record lies in `<run>/<stage>/stage.json`, which a rerun reads.
"""

import json
import math
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bebop.config import StageConfig, stage_of
from bebop.errors import (
    BebopError,
    ConfigError,
    InputError,
    StageError,
    disk_full,
    is_disk_full,
)
from bebop.metrics import unknown_metrics
from bebop.provenance import git_sha, hash_path, link_or_copy, show_outputs, write_json
from bebop.tracking import Tracker, open_tracker

if TYPE_CHECKING:
    from kfp import dsl

RUN_DIR = "BEBOP_RUN_DIR"
RUNNER_PID = "BEBOP_RUNNER_PID"
Run = Callable[..., dict[str, float]]


def run_stage(
    config: StageConfig,
    run: Run,
    *,
    inputs: Mapping[str, Path],
    outputs: Mapping[str, Path],
    consumed: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run one stage and return its record.

    Args:
        config: the stage's config.
        run: the stage's `run` function.
        inputs: input artifact name to path.
        outputs: output artifact name to path.
        consumed: input artifact name to the MLflow run that made it, where known.

    Returns:
        `{"status", "seconds", "metrics", "inputs", "outputs", ...}` as written to `stage.json`.

    Raises:
        BebopError: what the stage raised, after the record and tracking were closed.
    """
    check_device(config)
    stage = stage_of(type(config))
    run_dir = os.environ.get(RUN_DIR)
    folder = Path(run_dir) / stage if run_dir else None
    _limit_threads(config.threads)
    tracker = open_tracker(stage, folder)
    record = _new_record(stage, config, inputs, tracker)
    with _closing(record, folder, tracker):
        _save(folder, record)
        tracker.params({f"{stage}.{key}": value for key, value in config.model_dump().items()})
        tracker.tags(_identity(record, consumed or {}))
        checkpoints = folder / "checkpoints" if folder else None
        metrics = run(config, **inputs, **outputs, tracker=tracker, checkpoints=checkpoints)
        _finish(record, metrics, outputs, tracker, folder)
    return record


def check_device(config: StageConfig) -> None:
    """Refuse a torch device that is not there, before anything is computed.

    Raises:
        ConfigError: the config's `device` does not exist on this machine.
    """
    device = getattr(config, "device", "cpu")
    if device == "cpu":
        return
    import torch

    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"no device {device!r} here: {reason}",
            where=f"{stage_of(type(config))}.device",
            fix='Use "cpu", or run where the device is',
        ) from error


def _new_record(
    stage: str, config: StageConfig, inputs: Mapping[str, Path], tracker: Tracker
) -> dict[str, Any]:
    return {
        "version": 1,
        "stage": stage,
        "status": "running",
        "started_at": time.time(),
        "seconds": 0.0,
        "git_sha": git_sha(),
        "config": config.model_dump(mode="json"),
        "mlflow_run_id": tracker.run_id,
        "inputs": {name: describe(path) for name, path in inputs.items()},
        "outputs": {},
        "metrics": {},
    }


def describe(path: Path) -> dict[str, str]:
    """Path and hash of an artifact."""
    return {"path": str(Path(path).resolve()), "hash": hash_path(path)}


def _identity(record: Mapping[str, Any], consumed: Mapping[str, str]) -> dict[str, str]:
    tags = {
        "bebop.stage": record["stage"],
        "bebop.git_sha": record["git_sha"],
        "bebop.pipeline_run_id": os.environ.get("BEBOP_PIPELINE_RUN_ID", ""),
        "bebop.profile": os.environ.get("BEBOP_PROFILE", ""),
    }
    for name, artifact in record["inputs"].items():
        tags[f"bebop.input.{name}.uri"] = artifact["path"]
        tags[f"bebop.input.{name}.hash"] = artifact["hash"]
    for name, run_id in consumed.items():
        tags[f"bebop.input.{name}.run_id"] = run_id
    return {name: value for name, value in tags.items() if value}


def _finish(
    record: dict[str, Any],
    metrics: dict[str, float],
    outputs: Mapping[str, Path],
    tracker: Tracker,
    folder: Path | None,
) -> None:
    """Check and record what the stage gave back."""
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    metrics = {**metrics, "perf/peak_rss_mib": rss}
    if unknown := unknown_metrics(list(metrics)):
        raise StageError(
            f"metrics without a definition: {unknown}", fix="Add them to bebop/metrics.py"
        )
    record["metrics"] = {k: float(v) for k, v in metrics.items() if math.isfinite(v)}
    record["metrics_not_finite"] = sorted(set(metrics) - set(record["metrics"]))
    record["outputs"] = {name: describe(path) for name, path in outputs.items()}
    tracker.log(record["metrics"])
    for name, artifact in record["outputs"].items():
        tracker.tags(
            {
                f"bebop.output.{name}.uri": artifact["path"],
                f"bebop.output.{name}.hash": artifact["hash"],
            }
        )
    if "report" in outputs:
        report = outputs["report"]
        write_json(report.with_name(f"{report.name}.metrics.json"), record["metrics"])
        _attach_report(report, tracker)
    if folder is not None:
        show_outputs(folder, outputs)


def _attach_report(report: Path, tracker: Tracker) -> None:
    """Attach the report under a name that browsers and the MLflow UI take for HTML."""
    if report.suffix == ".html":
        tracker.artifact(report)
        return
    named = report.with_name("report.html")
    named.unlink(missing_ok=True)
    link_or_copy(report, named)
    tracker.artifact(named)


@contextmanager
def _closing(record: dict[str, Any], folder: Path | None, tracker: Tracker) -> Iterator[None]:
    """Write how the stage ended, whatever ended it."""
    start = time.monotonic()
    status = "failed"
    try:
        yield
        status = "succeeded"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except BebopError as error:
        record["error"] = str(error)
        raise
    except Exception as error:  # whatever a library makes of a full disk or of Ctrl-C
        if _was_interrupted(error):
            status = "interrupted"
            raise KeyboardInterrupt from error
        if not is_disk_full(error):
            raise
        full = disk_full(str(getattr(error, "filename", None) or folder or ""))
        record["error"] = full.what
        raise full from error
    finally:
        record["status"], record["seconds"] = status, time.monotonic() - start
        _save_ending(folder, record)
        ending = {"succeeded": "FINISHED", "interrupted": "KILLED"}.get(status, "FAILED")
        tracker.finish(ending)


def _was_interrupted(error: BaseException) -> bool:
    """Whether an error arose while a KeyboardInterrupt was on its way out.

    After Ctrl-C the runner no longer reads our output, so that a last progress line breaks the
    pipe, and that error takes the interrupt's place.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, KeyboardInterrupt):
            return True
        seen = seen.__context__
    return False


def _save(folder: Path | None, record: Mapping[str, Any]) -> None:
    if folder is not None:
        write_json(folder / "stage.json", record)


def _save_ending(folder: Path | None, record: Mapping[str, Any]) -> None:
    """Save the record; a disk without room even for that must not hide why the stage ended."""
    try:
        _save(folder, record)
    except OSError as error:
        if not is_disk_full(error):
            raise
        print(f"no room for {folder}/stage.json", file=sys.stderr, flush=True)


def _limit_threads(threads: int) -> None:
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        # Long spinning at OpenMP barriers starves the thread that everybody waits for as soon as
        # another process wants a core; a short spin costs little on idle ones.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)


def die_with_runner() -> None:
    """End this process when the pipeline runner is killed: an orphan would go on writing.

    A shell stands between the two, so the kernel's parent-death signal does not reach us; a
    thread waits on the runner's pidfd instead (Linux; elsewhere an orphan finishes its stage).
    """
    runner = os.environ.get(RUNNER_PID)
    if runner is None or not hasattr(os, "pidfd_open"):
        return
    try:
        descriptor = os.pidfd_open(int(runner))
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="die-with-runner", daemon=True).start()


def kfp_task(
    config_type: type[StageConfig],
    run: Run,
    config: str,
    *,
    inputs: Mapping[str, "dsl.Artifact"],
    outputs: Mapping[str, "dsl.Artifact"],
    metrics: "dsl.Metrics",
) -> dict[str, float]:
    """The body of every Kubeflow component.

    Args:
        config_type: the stage's `Config`.
        run: the stage's `run`.
        config: the config as text.
        inputs: input artifacts by name.
        outputs: output artifacts by name.
        metrics: Kubeflow's own metrics artifact.

    Returns:
        The stage's metrics.
    """
    die_with_runner()
    with user_errors():
        record = run_stage(
            config_type.from_text(config),
            run,
            inputs={name: Path(artifact.path) for name, artifact in inputs.items()},
            outputs={name: Path(artifact.path) for name, artifact in outputs.items()},
            consumed={
                name: str(artifact.metadata["mlflow_run_id"])
                for name, artifact in inputs.items()
                if artifact.metadata.get("mlflow_run_id")
            },
        )
    for name, artifact in outputs.items():
        artifact.metadata["hash"] = record["outputs"][name]["hash"]
        artifact.metadata["mlflow_run_id"] = record["mlflow_run_id"]
    for name, value in record["metrics"].items():
        metrics.log_metric(name, value)
    # The local cache only hits when a file lies at the metrics path.
    Path(metrics.path).parent.mkdir(parents=True, exist_ok=True)
    Path(metrics.path).write_text(json.dumps(record["metrics"]))
    return dict(record["metrics"])


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a `BebopError` as one message and exit with 1; anything else keeps its traceback."""
    try:
        yield
    except BebopError as error:
        print(f"\nerror: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\ninterrupted; what was finished is kept", file=sys.stderr, flush=True)
        sys.exit(130)


def checked_input(name: str, path: Path) -> Path:
    """The path of an input that must be there.

    Raises:
        InputError: nothing lies there.
    """
    if not path.exists():
        raise InputError(f"no {name} there", where=str(path), fix=f"Pass --{name} PATH")
    return path
