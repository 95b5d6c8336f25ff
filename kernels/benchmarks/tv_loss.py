"""Forward + backward time and memory of the TV losses beside their peers.

    python kernels/benchmarks/tv_loss.py [--device cpu|cuda] [--json FILE] [--threads N]
        [--vocab 151936 ...] [--rows 512 ...] [--hidden 64 ...] [--repeats 5] [--budget-gib 16]
        [--methods NAME ...]

Times are taken in one process, one method after the other and round after round, so that a busy
machine disturbs all of them alike; the processor time the process got stands beside the wall
time, for the same reason. Memory above the inputs is taken in a fresh process a method:
the resident high-water mark on a CPU, the allocator's peak on a GPU. A method that would not fit
the memory budget, or whose package or device is absent, is reported so and left out.

Shape suffixes: G draft depths, T rows, V vocabulary, H hidden.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from measure import hardware, peak_bytes, seconds, spread
from torch import Tensor

from bebop_kernels.tv_loss import chain_loss, linear_e2e_tv_loss, plan, reference
from bebop_kernels.tv_loss.linear import contract, project

DEPTHS = 3
DEFAULTS = {
    "cpu": {"vocab": [49_152, 151_936, 248_320], "rows": [512, 1024], "hidden": [64]},
    "cuda": {"vocab": [49_152, 151_936, 248_320], "rows": [512, 2048, 8192], "hidden": [2048]},
}


@dataclass(frozen=True)
class Case:
    device: str
    dtype: str
    vocab: int
    rows: int
    hidden: int
    threads: int

    def __str__(self) -> str:
        return f"V {self.vocab:,}, T {self.rows:,}, H {self.hidden:,}, γ {DEPTHS}, {self.dtype}"


@dataclass(frozen=True)
class Inputs:
    draft_GTH: Tensor
    target_SH: Tensor  # T + G rows
    weight_VH: Tensor
    mask_GT: Tensor


def make_inputs(case: Case) -> Inputs:
    """Drafts that resemble their targets: d_TV around a third, logits of a few units."""
    torch.manual_seed(0)
    options = {"device": case.device, "dtype": getattr(torch, case.dtype)}
    target_SH = torch.randn(case.rows + DEPTHS, case.hidden, **options)
    windows = torch.stack([target_SH[i : i + case.rows] for i in range(1, DEPTHS + 1)])
    draft_GTH = (windows + 0.3 * torch.randn_like(windows)).requires_grad_()
    weight_VH = 2 * torch.randn(case.vocab, case.hidden, **options) / case.hidden**0.5
    return Inputs(
        draft_GTH, target_SH, weight_VH, torch.ones(windows.shape[:2], device=case.device)
    )


def linear(inputs: Inputs) -> None:
    loss, _ = linear_e2e_tv_loss(
        inputs.draft_GTH, inputs.target_SH, inputs.weight_VH, inputs.mask_GT
    )
    loss.backward()


def plain_loss(draft_GTH: Tensor, target_SH: Tensor, weight_VH: Tensor, mask_GT: Tensor) -> Tensor:
    """The reference without its branches on the mask, so that torch.compile sees one graph."""
    draft_GTV = draft_GTH @ weight_VH.T
    target_SV = (target_SH @ weight_VH.T).detach()
    rows = draft_GTH.shape[1]
    windows = [target_SV[i : i + rows] for i in range(1, DEPTHS + 1)]
    pairs = zip(draft_GTV, windows, strict=True)
    tv_GT = torch.stack([reference.tv_loss(draft_TV, target_TV) for draft_TV, target_TV in pairs])
    return chain_loss(1 - tv_GT, mask_GT.bool())


compiled_loss = torch.compile(plain_loss, dynamic=False)


def eager(inputs: Inputs) -> None:
    plain_loss(*vars(inputs).values()).backward()


def compiled(inputs: Inputs) -> None:
    compiled_loss(*vars(inputs).values()).backward()


def products(inputs: Inputs) -> None:
    """The three matrix products alone, in the chunks of the linear form."""
    rows = inputs.draft_GTH.shape[1]
    device, (vocab, hidden) = inputs.weight_VH.device, inputs.weight_VH.shape
    chunk = plan.default_chunk(device, DEPTHS, rows, vocab, hidden)
    buffer = torch.empty(DEPTHS * chunk, vocab, device=device)
    with torch.no_grad():
        for first in range(0, rows, chunk):
            target_MH = inputs.target_SH[first + 1 : first + chunk + DEPTHS]
            project(target_MH, inputs.weight_VH, buffer[: len(target_MH)])
            draft_NH = inputs.draft_GTH[:, first : first + chunk].flatten(0, 1)
            project(draft_NH, inputs.weight_VH, buffer[: len(draft_NH)])
            contract(buffer[: len(draft_NH)], inputs.weight_VH)


def liger_tvd(inputs: Inputs) -> None:
    """Liger's loss takes probabilities and knows no chain: its mean over depths, not eq. 13."""
    from liger_kernel.transformers.tvd import LigerTVDLoss

    rows = inputs.draft_GTH.shape[1]
    target_SV = torch.softmax(inputs.target_SH @ inputs.weight_VH.T, -1, dtype=torch.float32)
    loss = torch.zeros((), device=inputs.weight_VH.device)
    for depth, draft_TH in enumerate(inputs.draft_GTH, start=1):
        q_TV = torch.softmax(draft_TH @ inputs.weight_VH.T, -1, dtype=torch.float32)
        loss = loss + LigerTVDLoss()(q_TV, target_SV[depth : depth + rows])
    loss.backward()


def liger_jsd(inputs: Inputs) -> None:
    """Another loss of the same shape of work, for scale."""
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    rows = inputs.draft_GTH.shape[1]
    target = torch.cat([inputs.target_SH[i : i + rows] for i in range(1, DEPTHS + 1)])
    draft = inputs.draft_GTH.flatten(0, 1)
    LigerFusedLinearJSD()(draft, inputs.weight_VH, target, inputs.weight_VH).backward()


METHODS: dict[str, Callable[[Inputs], None]] = {
    "linear_e2e_tv_loss": linear,
    "eager torch": eager,
    "torch.compile": compiled,
    "LigerTVDLoss + softmax": liger_tvd,
    "Liger fused_linear_jsd": liger_jsd,
    "matrix products alone": products,
}
# [G, T, V] fp32 tensors that a method is expected to hold at its peak.
HELD = {"eager torch": 4.0, "torch.compile": 4.0, "LigerTVDLoss + softmax": 5.0}


def why_not(name: str, case: Case, budget_gib: float) -> str | None:
    """The reason for leaving a method out, or None."""
    if name.startswith("Liger"):
        if find_spec("liger_kernel") is None:
            return "absent: liger-kernel is not installed"
        if case.device == "cpu":
            return "unmeasured: needs a GPU"
    need = HELD.get(name, 0) * DEPTHS * case.rows * case.vocab * 4 / 2**30
    return f"left out: about {need:.0f} GiB" if need > budget_gib else None


def run_once(name: str, case: Case, inputs: Inputs) -> tuple[float, float]:
    inputs.draft_GTH.grad = None
    return seconds(lambda: METHODS[name](inputs), case.device)


def measure_times(
    names: list[str], case: Case, repeats: int
) -> dict[str, list[tuple[float, float]]]:
    torch.set_num_threads(case.threads)
    inputs = make_inputs(case)
    for name in names:
        run_once(name, case, inputs)
    rounds = [{name: run_once(name, case, inputs) for name in names} for _ in range(repeats)]
    return {name: [one[name] for one in rounds] for name in names}


def measure_memory(name: str, case: Case) -> int:
    """Peak bytes above the inputs; to be called in a fresh process."""
    torch.set_num_threads(case.threads)
    inputs = make_inputs(case)
    if name == "torch.compile" or case.device == "cuda":
        run_once(name, case, inputs)  # compilation and workspaces are not the method's memory
    inputs.draft_GTH.grad = None
    return peak_bytes(lambda: METHODS[name](inputs), case.device)


def memory_in_fresh_process(name: str, case: Case) -> int:
    command = [sys.executable, __file__, "--worker", json.dumps([name, asdict(case)])]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(finished.stdout.split()[-1])


def measure(case: Case, methods: list[str], repeats: int, budget_gib: float) -> list[dict]:
    reasons = {name: why_not(name, case, budget_gib) for name in methods}
    names = [name for name, reason in reasons.items() if reason is None]
    memory = {name: memory_in_fresh_process(name, case) for name in names}
    times = measure_times(names, case, repeats)
    rows = []
    for name, reason in reasons.items():
        row: dict = {"case": str(case), "method": name, "absent": reason}
        if reason is None:
            wall, cpu = zip(*times[name], strict=True)
            row |= spread(wall) | {"cpu": median(cpu), "memory": memory[name]}
        rows.append(row)
    base = next((row for row in rows if row["method"] == "eager torch"), None)
    for row in rows:
        if base and row["absent"] is None and base["absent"] is None:
            for key in ("median", "cpu", "memory"):
                row[f"{key}_ratio"] = row[key] / base[key]
    return rows


def print_table(case: Case, rows: list[dict]) -> None:
    print(f"\n{case}; load average {os.getloadavg()[0]:.1f}\n")
    print("| method | median s | p20 | p80 | × eager | CPU s | × eager | memory MiB | × eager |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        if row["absent"] is not None:
            print(f"| {row['method']} | {row['absent']} | | | | | | | |")
            continue
        times = " | ".join(f"{row[key]:.4g}" for key in ("median", "p20", "p80"))
        keys = ("median_ratio", "cpu_ratio", "memory_ratio")
        wall, cpu, memory = (f"{row[key]:.3f}" if key in row else "" for key in keys)
        print(
            f"| {row['method']} | {times} | {wall} | {row['cpu']:.4g} | {cpu} "
            f"| {row['memory'] / 2**20:.1f} | {memory} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="float32, on cuda bfloat16"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads on a CPU")
    for name in ("vocab", "rows", "hidden"):
        parser.add_argument(f"--{name}", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget-gib", type=float, default=16, help="memory a method may take")
    parser.add_argument("--methods", choices=METHODS, nargs="+", default=list(METHODS))
    parser.add_argument("--json", type=Path, help="write every row here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, case = json.loads(arguments.worker)
        print(measure_memory(name, Case(**case)))
        return
    defaults = DEFAULTS[arguments.device]
    dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    print(f"{hardware(arguments.device)}, {arguments.threads} torch threads")
    everything = []
    for hidden in arguments.hidden or defaults["hidden"]:
        for vocab in arguments.vocab or defaults["vocab"]:
            for rows in arguments.rows or defaults["rows"]:
                case = Case(arguments.device, dtype, vocab, rows, hidden, arguments.threads)
                found = measure(case, arguments.methods, arguments.repeats, arguments.budget_gib)
                print_table(case, found)
                everything += found
                if arguments.json:
                    arguments.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
