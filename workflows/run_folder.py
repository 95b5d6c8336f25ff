"""A run's folder: what was asked, one folder a stage, and the summary.

runs/<id>/run.json            profile, configs, command, MLflow run ids
runs/<id>/<stage>/stage.json  record of a stage, written by the stage itself
runs/<id>/<stage>/…           links to its artifacts; checkpoints while it trains
runs/<id>/summary.json        all stages in one place
"""

import json
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bebop.errors import ArtifactError, InputError
from bebop.provenance import git_sha, hash_path, read_manifest, show_outputs, write_json
from workflows.profile import Profile
from workflows.stages import STAGES


def new_run_folder(runs_dir: Path, name: str) -> Path:
    """Create `runs/<time>-<name>`; a second run within the same second gets a suffix.

    Raises:
        InputError: the folder cannot be written.
    """
    stem = time.strftime("%Y%m%d-%H%M%S") + f"-{name}"
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        folder = runs_dir.resolve() / (stem + suffix)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(
                f"cannot create the run's folder: {error.strerror}",
                where=str(folder),
                fix="Pass another --runs-dir",
            ) from error
        return folder
    raise InputError("too many runs in one second", where=str(runs_dir), fix="Try again")


def write_request(folder: Path, profile: Profile, command: list[str], **extra: Any) -> None:
    """Write `run.json`: everything that is needed to ask for the same run again."""
    request = {
        "version": 1,
        "id": folder.name,
        "profile": profile.name,
        "configs": {
            name: config.model_dump(mode="json") for name, config in profile.configs.items()
        },
        "resources": profile.resources,
        "command": command,
        "git_sha": git_sha(),
        "created_at": time.time(),
        "pid": os.getpid(),
        **extra,
    }
    write_json(folder / "run.json", request)


def open_run(runs_dir: Path, run_id: str) -> tuple[Path, dict[str, Any]]:
    """Folder and request of an earlier run.

    Raises:
        InputError: no such run.
        ArtifactError: its `run.json` is missing or damaged.
    """
    folder = runs_dir.resolve() / run_id
    if not run_id or not folder.is_dir():
        known = sorted(p.name for p in runs_dir.glob("*") if (p / "run.json").is_file())
        shown = ", ".join(known[-5:]) if known else "none yet"
        raise InputError(f"no run {run_id!r}", where=str(runs_dir), fix=f"Latest runs: {shown}")
    return folder, read_manifest(folder, "run.json")


def stage_record(folder: Path, stage: str) -> dict[str, Any] | None:
    """The record that a stage wrote, or None when it never started."""
    if not (folder / stage / "stage.json").is_file():
        return None
    return read_manifest(folder / stage, "stage.json")


def usable_outputs(folder: Path, stage: str) -> dict[str, dict[str, Any]]:
    """Outputs of a finished stage, after checking that they are there and unchanged.

    Raises:
        ArtifactError: the stage did not finish, or an output is missing or has another hash.
    """
    record = stage_record(folder, stage)
    if record is None or record["status"] not in ("succeeded", "reused"):
        state = record["status"] if record else "never started"
        raise ArtifactError(
            f"{stage} of this run is not usable: {state}",
            where=str(folder),
            fix=f"Rerun from there: {rerun_command(folder, stage)}",
        )
    outputs: dict[str, dict[str, Any]] = {}
    for name, artifact in record["outputs"].items():
        path = present_path(folder, artifact["path"])
        problem = "is missing" if not path.exists() else ""
        if not problem and hash_path(path) != artifact["hash"]:
            problem = f"has changed since {stage} wrote it"
        if problem:
            raise ArtifactError(
                f"{name} {problem}",
                where=f"{path}, recorded {artifact['hash']}",
                fix=f"Rerun from there: {rerun_command(folder, stage)}",
            )
        outputs[name] = {**artifact, "path": str(path)}
    return outputs


def present_path(folder: Path, recorded: str) -> Path:
    """Where a recorded artifact lies now: a run's folder may have been moved or copied."""
    path = Path(recorded)
    if folder.name in path.parts:
        return folder.joinpath(*path.parts[path.parts.index(folder.name) + 1 :])
    return path


def rerun_command(folder: Path, stage: str) -> str:
    """The command that takes a run up at a stage, to be pasted where this run was started."""
    command = f"python pipeline.py rerun {stage} --run {folder.name}"
    if folder.parent == Path("runs").resolve():
        return command
    return f"{command} --runs-dir {shlex.quote(str(folder.parent))}"


def record_reused(folder: Path, source: Path, stage: str) -> None:
    """Note in a rerun's folder that a stage of another run is used as it is."""
    record = stage_record(source, stage)
    assert record is not None
    origin = record.get("reused_from", source.name)
    outputs = {
        name: {**artifact, "path": str(present_path(source, artifact["path"]))}
        for name, artifact in record["outputs"].items()
    }
    reused = {**record, "status": "reused", "reused_from": origin, "outputs": outputs}
    write_json(folder / stage / "stage.json", reused)
    paths = {name: Path(artifact["path"]) for name, artifact in outputs.items()}
    show_outputs(folder / stage, paths)


def summarize(folder: Path) -> dict[str, Any]:
    """Collect the stages' records into `summary.json` and return it.

    A stage whose record says "running" although its runner has ended was killed.
    """
    stages: dict[str, Mapping[str, Any]] = {}
    for stage in STAGES:
        record = stage_record(folder, stage)
        if record is None:
            stages[stage] = {"status": "not run"}
            continue
        keys = ("status", "seconds", "metrics", "inputs", "outputs", "error", "reused_from")
        stages[stage] = {key: record[key] for key in keys if key in record}
        if record["status"] == "running":
            stages[stage] = {**stages[stage], "status": "killed"}
    request = json.loads((folder / "run.json").read_text())
    summary = {
        "version": 1,
        "id": folder.name,
        "profile": request["profile"],
        "git_sha": request["git_sha"],
        "seconds": time.time() - request["created_at"],
        "stages": stages,
    }
    write_json(folder / "summary.json", summary)
    return summary
