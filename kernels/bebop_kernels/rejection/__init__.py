"""Lossless verification of a chain of drafts, with all randomness passed in."""

from bebop_kernels.rejection.verify import verify_chain

__all__ = ["verify_chain"]
