"""Rollout workers: Ray actors, each with an engine and a copy of the model of its own.

A worker answers one job after the other: load the given weights, generate, return. Weights travel
through Ray's object store as one safetensors blob of the trained tensors, put there once a version
and mapped by every worker of a machine. When a worker dies, its jobs come back as `Lost`, once
each, and a new worker stands in its place.
"""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from safetensors.torch import load, save
from torch import Tensor

from bebop.errors import StageError
from bebop.models.checkpoint import load_model
from bebop.rollout.engine import Completion, Request, Speculation
from bebop.rollout.reaper import descendants, reaped
from bebop.rollout.torch_engine import TorchEngine

# Ray puts Unix sockets below its folder, and their paths must stay under 108 bytes.
LONGEST_TEMP_DIR = 30
SMALLEST_OBJECT_STORE = 256 * 2**20
ATTEMPTS = 3
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Workers that ask Ray for no GPU keep the sight of them: device choice is ours.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True)
class WorkerSettings:
    """How a worker builds its engine.

    Attributes:
        model: folder of backbone and head, readable on the worker's machine.
        speculation: whether and how to draft.
        max_batch: requests decoded together.
        max_length: most tokens of prompt and completion together.
        threads: torch threads of the worker's process.
        device: torch device.
    """

    model: str
    speculation: Speculation
    max_batch: int
    max_length: int
    threads: int = 1
    device: str = "cpu"


@dataclass(frozen=True)
class Job:
    """Groups that one worker samples in one call."""

    sequences: tuple[int, ...]
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Generated:
    """A worker's answer: completions in request order, and the seconds it took."""

    job: Job
    completions: list[Completion]
    seconds: float


@dataclass(frozen=True)
class Lost:
    """A job whose worker died; nothing of it was returned."""

    job: Job
    reason: str


class RolloutWorker:
    """What runs in a worker's process."""

    def __init__(self, settings: WorkerSettings) -> None:
        torch.set_num_threads(settings.threads)
        backbone, head, _ = load_model(settings.model, device=settings.device)
        self.engine = TorchEngine(
            backbone,
            head,
            speculation=settings.speculation,
            max_batch=settings.max_batch,
            max_length=settings.max_length,
        )
        self.version = 0

    def pid(self) -> int:
        """Process id; answers once the model is loaded."""
        return os.getpid()

    def generate(
        self, requests: Sequence[Request], version: int, weights: bytes | None
    ) -> tuple[list[Completion], float]:
        """Sample the requests with the policy of `version`.

        Args:
            requests: what to complete.
            version: policy version that `weights` hold.
            weights: safetensors blob of every trained tensor; None stands for the model folder.

        Returns:
            Completions in request order and the seconds spent here.
        """
        start = time.monotonic()
        if version != self.version:
            assert weights is not None, f"no weights for version {version}"
            self.engine.load_weights(load(weights), version, selector="target")
            self.version = version
        return self.engine.generate(requests), time.monotonic() - start


class RolloutFleet:
    """All workers, seen from the driver.

    Args:
        settings: of every worker.
        workers: how many.
        timeout: seconds without any answer after which the stage gives up.
    """

    def __init__(self, settings: WorkerSettings, workers: int, timeout: float) -> None:
        self.settings, self.timeout = settings, timeout
        self.replaced = 0
        self._version = 0
        self._weights: Any = None
        self._running: dict[Any, tuple[Job, int, Any]] = {}
        self._workers = [self._new_worker() for _ in range(workers)]

    def _new_worker(self) -> Any:
        return ray.remote(RolloutWorker).options(num_cpus=1).remote(self.settings)

    def pids(self) -> list[int]:
        """Process ids of the workers; returns once every worker is up.

        Raises:
            StageError: a worker cannot start.
        """
        try:
            return list(ray.get([w.pid.remote() for w in self._workers], timeout=self.timeout))
        except RayError as error:
            raise StageError(
                f"a rollout worker cannot start: {_last_line(error)}",
                where="rollout",
                fix="Its own message is above",
            ) from error

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Make `tensors` the weights of every job submitted from now on."""
        blob = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        self._weights, self._version = ray.put(blob), version

    def submit(self, job: Job) -> None:
        """Give a job to the worker with the fewest jobs, the first of them when several have."""
        load_of = [0] * len(self._workers)
        for _, index, _ in self._running.values():
            load_of[index] += 1
        index = load_of.index(min(load_of))
        worker = self._workers[index]
        reference = worker.generate.remote(job.requests, self._version, self._weights)
        self._running[reference] = (job, index, worker)

    def wait(self) -> Generated | Lost:
        """The next job that ends, one way or the other.

        Raises:
            StageError: nothing ends in time, or a worker raised an error of its own.
        """
        assert self._running, "nothing is running"
        done, _ = ray.wait(list(self._running), num_returns=1, timeout=self.timeout)
        if not done:
            raise StageError(
                f"no rollout ended within {self.timeout:.0f} s",
                where="rollout",
                fix="Raise rollout_timeout, or ask for fewer or shorter samples",
            )
        job, index, worker = self._running.pop(done[0])
        try:
            completions, seconds = ray.get(done[0])
        except RayActorError as error:
            self._replace(index, worker)
            return Lost(job, _last_line(error))
        except RayTaskError as error:
            raise StageError(
                f"a rollout worker failed: {_last_line(error)}",
                where="rollout",
                fix="Its own message is above",
            ) from error
        return Generated(job, completions, seconds)

    def generate(self, job: Job) -> list[Completion]:
        """Submit one job while nothing else runs, and wait for its completions.

        Raises:
            StageError: the worker died again and again, or raised an error of its own.
        """
        assert not self._running, "other jobs would be mixed up with this one"
        reason = ""
        for _ in range(ATTEMPTS):
            self.submit(job)
            result = self.wait()
            if isinstance(result, Generated):
                return result.completions
            reason = result.reason
        raise StageError(
            f"a rollout worker died {ATTEMPTS} times over one job: {reason}",
            where="rollout",
            fix="Look for memory or driver errors above",
        )

    def close(self) -> None:
        """End the workers, whose jobs are dropped."""
        for worker in self._workers:
            ray.kill(worker)
        self._running.clear()

    def _replace(self, index: int, dead: Any) -> None:
        """Put a new worker in the place of a dead one; its other jobs are lost as well."""
        if self._workers[index] is dead:
            self._workers[index] = self._new_worker()
            self.replaced += 1


def _last_line(error: BaseException) -> str:
    """The line of a Ray error that says what happened; the rest is a remote traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


@contextmanager
def ray_session(address: str, cpus: int, object_store_bytes: int) -> Iterator[None]:
    """A Ray for the body: a running cluster, the one this process already has, or a local one.

    A local one is ended with the body, and also when this process is killed.

    Args:
        address: "host:port" of a running cluster; empty starts one on this machine.
        cpus: logical CPUs of the local one, one a worker.
        object_store_bytes: size of the local object store, in shared memory.
    """
    if ray.is_initialized():
        yield
        return
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not address:
        with _local_ray(cpus, object_store_bytes):
            yield
        return
    _connect(address)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _local_ray(cpus: int, object_store_bytes: int) -> Iterator[None]:
    folder, before = _temp_dir(), descendants()
    try:
        _start(cpus, object_store_bytes, folder)
        with reaped(descendants() - before, folder):
            yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _start(cpus: int, object_store_bytes: int, folder: Path) -> None:
    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=object_store_bytes,
            logging_level=logging.ERROR,
            _temp_dir=str(folder),
        )
    except (RuntimeError, ConnectionError, ValueError, RayError) as error:
        raise StageError(
            f"Ray cannot start: {_last_line(error)}",
            where=f"{cpus} CPUs, object store of {object_store_bytes // 2**20} MiB, {folder}",
            fix="Free memory, shared memory (/dev/shm) and disk, or set ray_address",
        ) from error


def _connect(address: str) -> None:
    try:
        ray.init(address=address, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise StageError(
            f"no Ray cluster answers: {_last_line(error)}",
            where=f"ray_address {address}",
            fix="Start one, or leave ray_address empty for this machine",
        ) from error


def _temp_dir() -> Path:
    base = tempfile.gettempdir()
    return Path(
        tempfile.mkdtemp(prefix="ray-", dir=base if len(base) < LONGEST_TEMP_DIR else "/tmp")
    )
