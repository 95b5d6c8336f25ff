"""What every benchmark here shares: time, memory above the inputs, and where it ran."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import quantiles

import psutil
import torch


def seconds(run: Callable[[], object], device: str) -> tuple[float, float]:
    """(wall, processor) seconds of one call, the device's queue included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start, start_cpu = time.perf_counter(), time.process_time()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - start_cpu


def spread(times: Sequence[float]) -> dict[str, float]:
    cuts = quantiles(times, n=10, method="inclusive")
    return {"median": cuts[4], "p20": cuts[1], "p80": cuts[7]}


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """Peak memory of one call above what is held before it.

    On a CPU the resident high-water mark, which sees every allocator; on a GPU the caching
    allocator's peak.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed would hide what this one takes
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = psutil.Process().memory_info().rss
    run()
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return peak * 1024 - before


def hardware(device: str) -> str:
    """One line that a table needs to mean something."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    ).stdout.strip()
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    return (
        f"{name}, {os.cpu_count()} CPUs, torch {torch.__version__}, "
        f"Python {platform.python_version()}, commit {commit or 'unknown'}"
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "CPU")
