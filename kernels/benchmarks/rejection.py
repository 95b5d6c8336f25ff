"""Time and memory of chain verification beside the usual dense form.

    python kernels/benchmarks/rejection.py [--device cpu|cuda] [--batch 32] [--repeats 20]
        [--vocab 49152 ...] [--depths 3 ...] [--json FILE]

The dense form is what engines commonly write in torch: the residual of every row, normalised, then
`torch.multinomial`. Times alternate between the methods; memory is above the inputs.

Shape suffixes: B requests, G draft depths, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from statistics import median

import torch
from measure import hardware, peak_bytes, seconds, spread
from torch import Tensor

from bebop_kernels.rejection import verify_chain

Given = tuple[Tensor, Tensor, Tensor, Tensor]


def make_inputs(batch: int, depths: int, vocab: int, device: str) -> Given:
    torch.manual_seed(0)
    target_BGV = torch.softmax(2 * torch.randn(batch, depths + 1, vocab, device=device), dim=-1)
    noise = 0.5 * torch.randn(batch, depths, vocab, device=device)
    draft_BGV = torch.softmax(target_BGV[:, :depths].log() + noise, dim=-1)
    tokens_BG = torch.multinomial(draft_BGV.flatten(0, 1), 1).view(batch, depths)
    return tokens_BG, draft_BGV, target_BGV, torch.rand(batch, depths + 1, device=device)


def dense(tokens_BG: Tensor, draft_BGV: Tensor, target_BGV: Tensor, uniforms: Tensor) -> Tensor:
    """Residuals of every depth, although at most one is drawn from."""
    depths = tokens_BG.shape[1]
    token_BG1 = tokens_BG.unsqueeze(-1)
    q_BG = draft_BGV.gather(-1, token_BG1).squeeze(-1)
    p_BG = target_BGV[:, :depths].gather(-1, token_BG1).squeeze(-1)
    accepted_B = (uniforms[:, :depths] * q_BG < p_BG).long().cumprod(1).sum(1)
    residual_BGV = (target_BGV[:, :depths] - draft_BGV).clamp(min=0)
    residual_BGV = residual_BGV / residual_BGV.sum(-1, keepdim=True)
    rows_BGV = torch.cat((residual_BGV, target_BGV[:, depths:]), dim=1)
    extra_BG = torch.multinomial(rows_BGV.flatten(0, 1), 1).view(len(tokens_BG), -1)
    return extra_BG.gather(1, accepted_B.unsqueeze(1))


def measure(given: Given, device: str, repeats: int) -> dict[str, dict[str, float]]:
    methods = {
        "verify_chain": partial(verify_chain, *given, check=False),
        "verify_chain, check": partial(verify_chain, *given),
        "dense torch": partial(dense, *given),
    }
    for run in methods.values():
        run()
    memory = {name: peak_bytes(run, device) for name, run in methods.items()}
    rounds = [{n: seconds(run, device) for n, run in methods.items()} for _ in range(repeats)]
    rows = {}
    for name in methods:
        wall, cpu = zip(*(one[name] for one in rounds), strict=True)
        rows[name] = spread(wall) | {"cpu": median(cpu), "memory": memory[name]}
    for row in rows.values():
        row["time_ratio"] = row["median"] / rows["dense torch"]["median"]
        row["cpu_ratio"] = row["cpu"] / rows["dense torch"]["cpu"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="torch threads on a CPU")
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--depths", type=int, nargs="+", default=[3])
    parser.add_argument("--json", type=Path, help="write every row here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{hardware(arguments.device)}, {arguments.threads} torch threads")
    everything = {}
    for vocab in arguments.vocab:
        for depths in arguments.depths:
            given = make_inputs(arguments.batch, depths, vocab, arguments.device)
            rows = measure(given, arguments.device, arguments.repeats)
            title = f"B {arguments.batch}, γ {depths}, V {vocab:,}"
            everything[title] = rows
            print(f"\n{title}; load average {os.getloadavg()[0]:.1f}\n")
            print("| method | median ms | p20 | p80 | × dense | CPU ms | × dense | memory MiB |")
            print("|---|---|---|---|---|---|---|---|")
            for name, row in rows.items():
                times = " | ".join(f"{1000 * row[key]:.1f}" for key in ("median", "p20", "p80"))
                cpu = f"{1000 * row['cpu']:.1f} | {row['cpu_ratio']:.3f}"
                memory = f"{row['memory'] / 2**20:.1f}"
                print(f"| {name} | {times} | {row['time_ratio']:.3f} | {cpu} | {memory} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
