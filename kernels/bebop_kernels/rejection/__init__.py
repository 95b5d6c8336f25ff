"""Lossless verification of a chain of drafts."""

from bebop_kernels.rejection.reference import verify_chain

__all__ = ["verify_chain"]
