"""Where an artifact came from, and how it is written: whole or not at all."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bebop.errors import ArtifactError

PROVENANCE = "provenance.json"
PACKAGES = ("bebop", "torch", "transformers", "triton", "ray", "kfp", "mlflow", "reasoning-gym")


def hash_path(path: Path) -> str:
    """SHA-256 of a file, or of a folder's relative names and contents.

    `provenance.json` is left out: it holds times, and two equal artifacts must hash alike.

    Raises:
        ArtifactError: nothing is there.
    """
    path = Path(path)
    if not path.exists():
        raise ArtifactError(
            "the artifact is missing", where=str(path), fix="Rerun the stage that writes it"
        )
    digest = hashlib.sha256()
    for file in _files(path):
        name = file.relative_to(path).as_posix() if path.is_dir() else ""
        digest.update(name.encode() + b"\0")
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name != PROVENANCE)


@contextlib.contextmanager
def atomic_dir(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `target`; it becomes `target` only when the body succeeds.

    An existing target is replaced, since a retried Kubeflow task reuses its output folder. It is
    moved aside first: deleting a large folder takes time, and a kill in between would leave half.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    temporary.chmod(0o755)
    try:
        yield temporary
        _sync_tree(temporary)
        aside = temporary.with_name(f"{temporary.name}.old")
        if target.exists() or target.is_symlink():
            target.rename(aside)
        temporary.rename(target)
        _sync(target.parent)
        _remove(aside)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Yield a temporary file path beside `target`, renamed onto it when the body succeeds."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    temporary.chmod(0o644)
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(target)
        _sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(target: Path, value: Any) -> None:
    """Write JSON atomically; NaN and infinity are refused, since JSON has neither."""
    with atomic_file(target) as temporary:
        temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    """Make every file durable, and readable by the user of the next stage's pod.

    safetensors and temporary files come with mode 0600.
    """
    for file in folder.rglob("*"):
        if not file.is_symlink():
            mode = file.stat().st_mode
            if mode & 0o444 != 0o444:
                file.chmod(mode | 0o444)
            _sync(file)
    _sync(folder)


def write_provenance(
    folder: Path, stage: str, config: Mapping[str, Any], inputs: Mapping[str, Path]
) -> None:
    """Write `provenance.json`: config, code, package versions, seed and input hashes.

    Args:
        folder: the artifact's folder (still temporary inside `atomic_dir`).
        stage: name of the stage.
        config: the resolved config as plain values.
        inputs: input artifact name to path.
    """
    record = {
        "version": 1,
        "stage": stage,
        "config": dict(config),
        "seed": config.get("seed"),
        "git_sha": git_sha(),
        "packages": package_versions(),
        "python": platform.python_version(),
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "inputs": {name: {"hash": hash_path(path)} for name, path in inputs.items()},
    }
    write_json(Path(folder) / PROVENANCE, record)


def git_sha() -> str:
    """Commit of the code: `BEBOP_GIT_SHA` inside an image, git in a checkout, else "unknown".

    Uncommitted changes add the suffix "-dirty".
    """
    if sha := os.environ.get("BEBOP_GIT_SHA"):
        return sha
    here = Path(__file__).parent
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that can change a result."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def read_manifest(folder: Path, name: str, version: int = 1) -> dict[str, Any]:
    """Read an artifact's JSON file and check its version.

    Raises:
        ArtifactError: missing, not JSON, or written in a version this reader does not know.
    """
    file = Path(folder) / name
    if not file.is_file():
        raise ArtifactError(
            f"the artifact has no {name}", where=str(folder), fix="Rerun the stage that writes it"
        )
    try:
        record = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(
            f"damaged JSON: {error}", where=str(file), fix="Rerun the stage that writes it"
        ) from error
    if not isinstance(record, dict) or record.get("version") != version:
        found = record.get("version") if isinstance(record, dict) else type(record).__name__
        raise ArtifactError(
            f"version {found!r} is not known; this code reads version {version}",
            where=str(file),
            fix="Rerun the stage that writes it with this code",
        )
    return record


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """A second name for a file: a hard link where the file system allows it, else a copy.

    Artifacts are never changed in place, so sharing an inode is safe and costs no disk.
    """
    # The hub cache holds links; a hard link to a link would point nowhere.
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except OSError:
        shutil.copy2(real, target)


def link_or_copy_tree(source: Path, target: Path) -> None:
    """`link_or_copy` for every file of a folder."""
    shutil.copytree(source, target, copy_function=link_or_copy, dirs_exist_ok=True)


def show_outputs(folder: Path, outputs: Mapping[str, Path]) -> None:
    """Make a stage's artifacts visible in its folder, since Kubeflow's runner picks its own paths.

    Folders become symbolic links. A report becomes a file named `report.html`: browsers judge a
    link by the name it points to, and Kubeflow's has no ending.
    """
    for name, path in outputs.items():
        shown = folder / ("report.html" if name == "report" else name)
        shown.unlink(missing_ok=True)
        if path.is_dir():
            shown.symlink_to(os.path.relpath(path.resolve(), folder.resolve()))
        else:
            link_or_copy(path, shown)
