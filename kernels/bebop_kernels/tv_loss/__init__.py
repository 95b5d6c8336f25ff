"""Total-variation losses for MTP heads, on logits and fused with the output projection.

    tv_loss, kl_loss, rkl_loss, ce_loss      per position, on logits
    e2e_tv_loss                              the end-to-end chain of arXiv 2606.12370 eq. 13
    linear_{e2e_tv,tv,kl,rkl,ce}_loss        on hidden states, never holding a [T, V] tensor

Forms, picked by `impl`, else by the device of the draft: "reference" (plain torch, the oracle),
"chunked" (torch, default off the GPU), "triton" (default on CUDA and ROCm).

The full vocabulary takes part, in fp32 (fp64 for fp64 inputs); -inf marks padded entries. The
target is never differentiated. See the README beside this file for the derivations.
"""

from bebop_kernels.tv_loss.chain import chain_loss, chain_weights, mean_loss, valid_depths
from bebop_kernels.tv_loss.on_hidden import (
    linear_ce_loss,
    linear_e2e_tv_loss,
    linear_kl_loss,
    linear_rkl_loss,
    linear_tv_loss,
)
from bebop_kernels.tv_loss.on_logits import ce_loss, e2e_tv_loss, kl_loss, rkl_loss, tv_loss

__all__ = [
    "ce_loss",
    "chain_loss",
    "chain_weights",
    "e2e_tv_loss",
    "kl_loss",
    "linear_ce_loss",
    "linear_e2e_tv_loss",
    "linear_kl_loss",
    "linear_rkl_loss",
    "linear_tv_loss",
    "mean_loss",
    "rkl_loss",
    "tv_loss",
    "valid_depths",
]
