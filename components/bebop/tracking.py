"""MLflow tracking: the only module that knows MLflow.

A pipeline run is one parent MLflow run with one child a stage. A stage that finds `MLFLOW_RUN_ID`
resumes that run; Kubeflow's MLflow plugin and `pipeline.py run` both set it. A tracking server
that is away never costs a training run: after retries the calls go to a spool file, which is
replayed as soon as a call gets through again.
"""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bebop.errors import StageError
from bebop.metrics import unknown_metrics

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "bebop"
PARENT_TAG = "mlflow.parentRunId"
RETRIES = 3
OPEN_STATUSES = ("SCHEDULED", "RUNNING")
AWAY_SECONDS = 30.0
# What a store says to a call that it will refuse however often it is repeated.
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE")
# MLflow's own defaults retry for minutes; a stage must not wait that long for a curve.
CLIENT_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_TELEMETRY": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}


class Tracker(Protocol):
    """What a stage may say while it runs."""

    run_id: str

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record metrics; values that are not finite are left out and counted."""

    def params(self, values: Mapping[str, Any]) -> None:
        """Record the resolved config."""

    def tags(self, values: Mapping[str, str]) -> None:
        """Record identities: hashes, URIs, run ids."""

    def artifact(self, path: Path, folder: str = "") -> None:
        """Attach a small file (a report); models are recorded by URI and hash instead."""

    def finish(self, status: str) -> None:
        """End the run as FINISHED, FAILED or KILLED."""


class NoTracking:
    """Records nothing: for a stage that is called on its own without a tracking URI."""

    run_id = ""

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        _finite(metrics)

    def params(self, values: Mapping[str, Any]) -> None: ...

    def tags(self, values: Mapping[str, str]) -> None: ...

    def artifact(self, path: Path, folder: str = "") -> None: ...

    def finish(self, status: str) -> None: ...


NO_TRACKING = NoTracking()


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The finite values; raises `ValueError` for a name that the dictionary does not define."""
    if unknown := unknown_metrics(list(metrics)):
        raise ValueError(f"metrics without a definition in bebop.metrics.METRICS: {unknown}")
    finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    if dropped := sorted(set(metrics) - set(finite)):
        print(f"not logged, not finite: {', '.join(dropped)}", file=sys.stderr, flush=True)
    return finite


class MlflowTracker:
    """A tracker over one MLflow run.

    Args:
        connect: makes the client; called again for as long as it fails.
        run_id: the run to write to.
        spool: file for calls that could not be delivered.
    """

    def __init__(self, connect: "Callable[[], MlflowClient]", run_id: str, spool: Path) -> None:
        self.run_id, self.spool = run_id, spool
        self._connect = connect
        self._client: MlflowClient | None = None
        self._away_until = 0.0

    @property
    def client(self) -> "MlflowClient":
        if self._client is None:
            self._client = self._connect()
        return self._client

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        stamp = int(time.time() * 1000)
        rows = [[name, value, stamp, step or 0] for name, value in _finite(metrics).items()]
        self._deliver("log", rows)

    def params(self, values: Mapping[str, Any]) -> None:
        self._deliver("params", [[name, str(value)[:6000]] for name, value in values.items()])

    def tags(self, values: Mapping[str, str]) -> None:
        self._deliver("tags", [[name, str(value)[:5000]] for name, value in values.items()])

    def artifact(self, path: Path, folder: str = "") -> None:
        self._deliver("artifact", [[str(path), folder]])

    def resume(self) -> None:
        """Show a scheduled or ended run as running."""
        self._deliver("resume", [])

    def finish(self, status: str) -> None:
        # The last chance to deliver: tried even when the store was away a moment ago.
        self._away_until = 0.0
        self._deliver("finish", [[status]])

    def _deliver(self, kind: str, rows: list[list[Any]]) -> None:
        """Send after whatever is spooled; spool when the store is away."""
        if time.monotonic() < self._away_until:
            self._spool(kind, rows)
            return
        try:
            with_retries(self._replay)
            with_retries(lambda: self._send_or_say(kind, rows))
        except store_errors() as error:
            self._away_until = time.monotonic() + AWAY_SECONDS
            self._spool(kind, rows)
            reason = str(error).splitlines()[0]
            _say(f"MLflow is away ({reason}); tracking goes to {self.spool} and is replayed later")

    def _send_or_say(self, kind: str, rows: list[list[Any]]) -> None:
        """Send; a call that the store will never take is reported and dropped."""
        try:
            self._send(kind, rows)
        except store_errors() as error:
            if not _refused(error):
                raise
            _say(f"MLflow refused {kind}: {error}")

    def _send(self, kind: str, rows: list[list[Any]]) -> None:
        client = self.client
        from mlflow.entities import Metric, Param, RunTag

        if kind == "log":
            client.log_batch(self.run_id, metrics=[Metric(*row) for row in rows])
        elif kind == "params":
            client.log_batch(self.run_id, params=[Param(*row) for row in rows])
        elif kind == "tags":
            client.log_batch(self.run_id, tags=[RunTag(*row) for row in rows])
        elif kind == "artifact":
            for path, folder in rows:
                client.log_artifact(self.run_id, path, folder or None)
        elif kind == "resume":
            client.update_run(self.run_id, status="RUNNING")
        else:
            assert kind == "finish", kind
            client.set_terminated(self.run_id, rows[0][0])

    def _spool(self, kind: str, rows: list[list[Any]]) -> None:
        try:
            self.spool.parent.mkdir(parents=True, exist_ok=True)
            with self.spool.open("a") as stream:
                stream.write(json.dumps([kind, rows]) + "\n")
        except OSError as error:
            _say(f"{kind} is lost to MLflow, the spool cannot be written: {error}")

    def _replay(self) -> None:
        if not self.spool.exists():
            return
        # A line without its end was cut by a kill.
        for line in self.spool.read_text().split("\n")[:-1]:
            self._send_or_say(*json.loads(line))
        self.spool.unlink()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _refused(error: Exception) -> bool:
    """Whether repeating the call is useless: a refusal, or an artifact that is gone."""
    if isinstance(error, OSError):
        return isinstance(error, FileNotFoundError)
    return getattr(error, "error_code", "") in REFUSALS


def store_errors() -> tuple[type[Exception], ...]:
    """What an absent or broken tracking store raises."""
    from mlflow.exceptions import MlflowException

    return (MlflowException, OSError)


def with_retries(call: Callable[[], None]) -> None:
    """Call with back-off; the last error is raised."""
    errors = store_errors()
    for attempt in range(RETRIES):
        try:
            return call()
        except errors:
            if attempt == RETRIES - 1:
                raise
            time.sleep(0.2 * 2**attempt)


def make_client(uri: str) -> "MlflowClient":
    """An MLflow client that gives up in seconds and reports nothing to anybody."""
    for name, value in CLIENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    import logging

    logging.getLogger("alembic").setLevel(logging.WARNING)
    # It logs a stack trace for every failed attempt; the tracker reports the failure in a line.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def open_tracker(stage: str, spool_folder: Path | None = None) -> Tracker:
    """The tracker for this process, from MLflow's own environment variables.

    `MLFLOW_RUN_ID` is taken out of the environment, so that Ray's workers do not write to it.
    Without `MLFLOW_TRACKING_URI` nothing is tracked. With a URI but no run id, a run is created.

    Args:
        stage: stage name, used for a run created here.
        spool_folder: where undelivered calls go; default: the temporary folder.

    Raises:
        StageError: a run has to be created and the store cannot be reached.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    run_id = os.environ.pop("MLFLOW_RUN_ID", "")
    if not uri:
        return NO_TRACKING
    run_id = run_id or _create_run(uri, stage)
    folder = spool_folder or Path(tempfile.gettempdir())
    spool = folder / f"mlflow-spool-{run_id}.jsonl"
    tracker = MlflowTracker(lambda: make_client(uri), run_id, spool)
    tracker.resume()
    tracker.tags({"bebop.stage": stage})
    return tracker


def _create_run(uri: str, name: str) -> str:
    with _reachable(uri):
        client = make_client(uri)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or ensure_experiment(client, None)
        return str(client.create_run(experiment, run_name=name).info.run_id)


@contextmanager
def _reachable(uri: str) -> Iterator[None]:
    """Turn an absent store into one message, before anything was computed that could be lost."""
    try:
        yield
    except store_errors() as error:
        raise StageError(
            f"the tracking store cannot be used: {str(error).splitlines()[0]}",
            where=f"MLFLOW_TRACKING_URI={uri}",
            fix="Start it, correct the address, or unset MLFLOW_TRACKING_URI",
        ) from error


def ensure_experiment(client: "MlflowClient", artifacts: Path | None) -> str:
    """Id of the experiment "bebop" (or `MLFLOW_EXPERIMENT_NAME`), created when it is not there."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    location = artifacts.resolve().as_uri() if artifacts is not None else None
    kind = {"mlflow.experimentKind": "custom_model_development"}  # the UI opens on runs and curves
    return str(client.create_experiment(name, artifact_location=location, tags=kind))


def open_pipeline_run(
    uri: str,
    artifacts: Path,
    run_name: str,
    stages: list[str],
    tags: Mapping[str, str],
) -> tuple[str, str, dict[str, str]]:
    """Create the parent run and one scheduled child a stage.

    Returns:
        Experiment id, parent run id, and the child run id of each stage.

    Raises:
        StageError: the store cannot be reached.
    """
    with _reachable(uri):
        client = make_client(uri)
        experiment = ensure_experiment(client, artifacts)
        parent = client.create_run(experiment, run_name=run_name, tags=dict(tags)).info.run_id
        children = {}
        for stage in stages:
            child_tags = {**tags, PARENT_TAG: parent, "bebop.stage": stage}
            child = client.create_run(experiment, run_name=f"{stage} {run_name}", tags=child_tags)
            client.update_run(child.info.run_id, status="SCHEDULED")
            children[stage] = child.info.run_id
    return experiment, parent, children


def close_pipeline_run(
    uri: str, parent: str, children: Mapping[str, str], metrics: Mapping[str, float], status: str
) -> None:
    """Copy headline metrics to the parent and end every run that is still open.

    A store that is away is reported: the results are on disk, and the run must end well.
    """
    try:
        client = make_client(uri)
        for name, value in metrics.items():
            client.log_metric(parent, name, value)
        client.set_terminated(parent, status)
        close_dead_run(uri, "", children)
    except store_errors() as error:
        _say(f"MLflow is away ({str(error).splitlines()[0]}); run {parent} stays open there")


def close_dead_run(uri: str, parent: str, children: Mapping[str, str]) -> None:
    """End the runs that a killed runner left open; those that ended keep their status."""
    client = make_client(uri)
    for run_id in (*children.values(), parent):
        if run_id and client.get_run(run_id).info.status in OPEN_STATUSES:
            client.set_terminated(run_id, "KILLED")
