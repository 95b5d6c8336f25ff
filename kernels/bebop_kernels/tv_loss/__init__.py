"""Total-variation losses for MTP heads, on logits and fused with the output projection."""

from bebop_kernels.tv_loss.reference import e2e_tv_loss, tv_loss

__all__ = ["e2e_tv_loss", "tv_loss"]
