"""The machine that the figures belong to."""

import os
import platform
from pathlib import Path
from typing import Any

import torch


def hardware(device: torch.device) -> dict[str, Any]:
    """Processor, cores, threads, versions; the device's name where it is not the CPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {
        "device": device.type,
        "name": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "torch": str(torch.__version__),
        "system": platform.system(),
    }


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the kernel reports it, else its architecture."""
    if info.is_file():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()
