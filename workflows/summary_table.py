"""The table that ends a run: stage, time, headline metrics, and where to look."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from workflows.stages import CONTRACTS, STAGES

STYLES = {"succeeded": "green", "reused": "cyan", "not run": "dim"}


def print_summary(folder: Path, summary: Mapping[str, Any], mlflow: Mapping[str, Any]) -> None:
    """Print the table, the reports and the command that opens MLflow on the run."""
    console = Console(soft_wrap=True)
    console.print(_table(summary))
    for stage in STAGES:
        report = folder / stage / "report.html"
        if report.exists():
            console.print(f"report {stage:10} {report}", highlight=False)
    console.print(f"summary           {folder / 'summary.json'}", highlight=False)
    if mlflow["parent"]:
        _print_mlflow(console, mlflow)


def _table(summary: Mapping[str, Any]) -> Table:
    table = Table(title=f"{summary['id']} · {summary['seconds']:.0f} s")
    table.add_column("stage")
    table.add_column("status")
    table.add_column("seconds", justify="right")
    table.add_column("headline")
    for stage in STAGES:
        record = summary["stages"][stage]
        status = record["status"]
        style = STYLES.get(status, "red")
        seconds = f"{record['seconds']:.1f}" if "seconds" in record else ""
        headline = _headline(stage, record) or record.get("error", "")
        table.add_row(stage, f"[{style}]{status}[/{style}]", seconds, headline)
    return table


def _headline(stage: str, record: Mapping[str, Any]) -> str:
    metrics = record.get("metrics", {})
    names = [name for name in CONTRACTS[stage].headline if name in metrics]
    return "  ".join(f"{name} {metrics[name]:.4g}" for name in names)


def _print_mlflow(console: Console, mlflow: Mapping[str, Any]) -> None:
    uri = mlflow["uri"]
    console.print("MLflow:", highlight=False)
    if not uri.startswith("http"):
        command = f"mlflow ui --backend-store-uri {shlex.quote(uri)} --port 5000"
        console.print(f"  .venv/bin/{command}", highlight=False)
        uri = "http://127.0.0.1:5000"
    page = f"{uri}/#/experiments/{mlflow['experiment']}/runs/{mlflow['parent']}"
    console.print(f"  {page}", highlight=False)
