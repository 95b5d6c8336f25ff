"""What a stage's pod needs on a cluster: one helper a need."""

from collections.abc import Mapping
from typing import Any

from kfp import dsl, kubernetes

from bebop.errors import ConfigError

KEYS = ("cpu", "memory", "gpus", "accelerator", "shm")


def apply_resources(task: dsl.PipelineTask, needs: Mapping[str, Any], stage: str) -> None:
    """Apply a profile's `[resources.STAGE]` table to the stage's task.

    Keys: cpu ("4"), memory ("16Gi"), gpus (count), accelerator ("nvidia.com/gpu"), shm ("8Gi").

    Raises:
        ConfigError: an unknown key.
    """
    if unknown := sorted(set(needs) - set(KEYS)):
        raise ConfigError(
            f"unknown resource keys {unknown}",
            where=f"[resources.{stage}]",
            fix=f"Keys are {', '.join(KEYS)}",
        )
    if "cpu" in needs:
        task.set_cpu_request(str(needs["cpu"])).set_cpu_limit(str(needs["cpu"]))
    if "memory" in needs:
        task.set_memory_request(str(needs["memory"])).set_memory_limit(str(needs["memory"]))
    if needs.get("gpus"):
        gpu(task, int(needs["gpus"]), str(needs.get("accelerator", "nvidia.com/gpu")))
        dshm(task, str(needs.get("shm", "8Gi")))


def gpu(task: dsl.PipelineTask, count: int, accelerator: str) -> None:
    """Ask for `count` accelerators of a resource name such as "nvidia.com/gpu"."""
    task.set_accelerator_type(accelerator).set_accelerator_limit(count)


def dshm(task: dsl.PipelineTask, size: str) -> None:
    """Memory-backed /dev/shm: the default 64 MiB kills PyTorch workers with a bus error."""
    kubernetes.empty_dir_mount(
        task, volume_name="dshm", mount_path="/dev/shm", medium="Memory", size_limit=size
    )
