"""Which form of an operation runs: the caller's choice, else the tensor's device."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Impl = Literal["reference", "chunked", "triton"]
IMPLS = ("reference", "chunked", "triton")


def pick(impl: Impl | None, tensor: Tensor) -> Impl:
    """The form to run; `None` means Triton on CUDA and ROCm, chunked torch elsewhere."""
    if impl is None:
        return "triton" if tensor.is_cuda else "chunked"
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)} or None, got {impl!r}")
    return impl
