"""Compile every Triton kernel offline, without a GPU, and print what each one takes.

    python kernels/benchmarks/compile_kernels.py [--target sm_80 sm_90 gfx942]

One Markdown row a kernel and target: shared memory (bytes), registers a thread, bytes of local
memory (cuda) or registers (amd) spilled.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bebop_kernels.rejection import fused as rejection
from bebop_kernels.tv_loss import fused as losses
from bebop_kernels.tv_loss import launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
KINDS = {"tv": 0, "kl": 1, "rkl": 2, "ce": 3}
POINTERS = {
    "offset": "*i64",
    "label": "*i64",
    "token": "*i64",
    "num_accepted": "*i64",
    "out": "*i64",
}


def variants() -> list[tuple[str, object, dict[str, str], dict[str, int], int]]:
    """(name, kernel, logits dtypes, constants, warps) for everything that a launch can ask for."""
    block = {"BLOCK": launch.BLOCK_V}
    bf16 = {"x_ptr": "*bf16", "z_ptr": "*bf16", "y_ptr": "*bf16", "grad_ptr": "*bf16"}
    rows = [("softmax_stats_kernel", losses.softmax_stats_kernel, {}, block, 8)]
    rows.append(("softmax_stats_kernel bf16", losses.softmax_stats_kernel, bf16, block, 8))
    for kernel in (losses.loss_stats_kernel, losses.loss_grad_kernel):
        name = kernel.__name__
        for kind, number in KINDS.items():
            rows.append((f"{name} {kind}", kernel, {}, block | {"KIND": number}, 8))
        rows.append((f"{name} tv bf16", kernel, bf16, block | {"KIND": 0}, 8))
    rows.append(("hard_value_kernel", losses.hard_value_kernel, {}, {}, 1))
    rows.append(("hard_grad_kernel", losses.hard_grad_kernel, {}, block, 8))
    for name, gumbel in (("inverse", 0), ("gumbel", 1)):
        constants = {"DEPTHS": 3, "GUMBEL": bool(gumbel), "BLOCK": rejection.BLOCK_V}
        title = f"verify_chain_kernel {name}"
        rows.append((title, rejection.verify_chain_kernel, {}, constants, 8))
    return rows


def signature(kernel, dtypes: dict[str, str], constants: dict[str, int]) -> dict[str, str]:
    """Argument types by the kernels' own naming: *_ptr are pointers, V is an integer."""
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name == "V":
            types[name] = "i32"
        else:
            stem = name.removesuffix("_ptr").removeprefix("z_").removeprefix("y_")
            stem = stem.removeprefix("grad_") if stem != "grad_ptr" else stem
            types[name] = dtypes.get(name, POINTERS.get(stem, "*fp32"))
    return types


def compile_one(kernel, dtypes, constants, warps, target: GPUTarget):
    source = ASTSource(kernel, signature(kernel, dtypes, constants), constexprs=constants)
    return triton.compile(source, target=target, options={"num_warps": warps})


def resources(compiled, target: str) -> tuple[int, int, int]:
    """(shared memory, registers a thread, spilled bytes) of a compiled kernel."""
    if target == "gfx942":
        text = compiled.asm["amdgcn"]
        spills = _number(r"\.vgpr_spill_count:\s*(\d+)", text)
        return compiled.metadata.shared, _number(r"\.vgpr_count:\s*(\d+)", text), spills
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [str(tool), "--dump-resource-usage", cubin.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spilled = _number(r"STACK:(\d+)", text) + _number(r"LOCAL:(\d+)", text)
    return compiled.metadata.shared, _number(r"REG:(\d+)", text), spilled


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise SystemExit(f"no match for {pattern!r} in the compiler's output")
    return int(found.group(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    arguments = parser.parse_args()
    print("| kernel | target | shared memory, bytes | registers | spilled |")
    print("|---|---|---|---|---|")
    for name, kernel, dtypes, constants, warps in variants():
        for target in arguments.target:
            compiled = compile_one(kernel, dtypes, constants, warps, TARGETS[target])
            shared, registers, spilled = resources(compiled, target)
            print(f"| `{name}` | {target} | {shared} | {registers} | {spilled} |")


if __name__ == "__main__":
    main()
