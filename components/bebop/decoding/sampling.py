"""From logits to a token: temperature, filters, counter-based random numbers, CDF inversion.

Shape suffixes: B rows, V vocabulary.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from bebop.errors import InputError
from bebop_kernels.rejection import verify_chain

Stream = Literal["draft", "accept", "residual"]

# Any three distinct odd constants would do: they separate the streams before hashing.
_STREAM_KEYS: dict[str, int] = {
    "draft": 0x2545F4914F6CDD1D,
    "accept": 0x9E3779B97F4A7C15,
    "residual": 0xD1342543DE82EF95,
}
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def probs_from_logits(
    logits_BV: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Distribution that is sampled from: temperature, then top-k, then top-p, in fp32.

    Every draft and every target distribution goes through here, so that q and p see the same
    filters in the same order. A float64 input stays float64.

    Args:
        logits_BV: [..., V] logits of any float type.
        temperature: 0 puts all mass on the (first) argmax.
        top_k: keep the k likeliest (the lower token wins a tie); 0 keeps all.
        top_p: keep the shortest likeliest-first prefix with at least this mass, measured after
            top-k and renormalisation; 1 keeps all. At least one token stays.

    Returns:
        [..., V] probabilities that sum to 1.
    """
    if not (0.0 <= temperature < math.inf) or top_k < 0 or not (0.0 < top_p <= 1.0):
        raise InputError(
            f"temperature {temperature}, top_k {top_k}, top_p {top_p} cannot be sampled with",
            where="probs_from_logits",
            fix="temperature and top_k are at least 0, top_p is in (0, 1]",
        )
    if logits_BV.dtype != torch.float64:
        logits_BV = logits_BV.float()
    if temperature == 0.0:
        return one_hot(logits_BV.argmax(-1), logits_BV.shape[-1], logits_BV.dtype)
    probs_BV = torch.softmax(logits_BV if temperature == 1.0 else logits_BV / temperature, dim=-1)
    if top_k == 0 and top_p == 1.0:
        return probs_BV
    return _filtered(probs_BV, top_k, top_p)


def _filtered(probs_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    if 0 < top_k < sorted_BV.shape[-1]:
        sorted_BV[..., top_k:] = 0.0
        sorted_BV /= sorted_BV.sum(-1, keepdim=True)
    if top_p < 1.0:
        mass_before_BV = sorted_BV.cumsum(-1) - sorted_BV
        keep_BV = mass_before_BV < top_p
        keep_BV[..., 0] = True
        sorted_BV = sorted_BV * keep_BV
        sorted_BV /= sorted_BV.sum(-1, keepdim=True)
    return torch.zeros_like(probs_BV).scatter_(-1, order_BV, sorted_BV)


def one_hot(tokens_B: Tensor, vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """All mass on one token: [...] int64 -> [..., V]."""
    shape = (*tokens_B.shape, vocab_size)
    probs_BV = torch.zeros(shape, dtype=dtype, device=tokens_B.device)
    return probs_BV.scatter_(-1, tokens_B[..., None], 1.0)


def uniforms(seeds_B: Tensor, positions_B: Tensor, stream: Stream) -> Tensor:
    """Random numbers that depend on nothing but (seed, position, stream).

    Args:
        seeds_B: int64 request seeds (`seed_key` of the request's seed).
        positions_B: int64 index of the token that the number decides about; broadcasts with
            seeds_B.
        stream: draft, accept and residual draws are independent streams.

    Returns:
        float64 in [0, 1), multiples of 2**-53, in the broadcast shape.
    """
    key_B = _mix(seeds_B.to(torch.int64) + _signed(_STREAM_KEYS[stream]))
    bits_B = _mix(key_B ^ _mix(positions_B.to(torch.int64) * _signed(_GOLDEN) + _signed(_GOLDEN)))
    return _shift_right(bits_B, 11).to(torch.float64) * 2.0**-53


def seed_key(seed: int) -> int:
    """Any Python integer as the int64 that `uniforms` takes (its low 64 bits)."""
    return _signed(seed & _MASK64)


def _signed(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own `>>` copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014); int64 products wrap around."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def sample(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Invert the CDF: the first token whose cumulative mass is strictly above u * Z.

    It is the verifier's own draw, that of a chain without drafts, so that drafts, plain tokens
    and residuals follow one rule: fp64 sums, and never a token of probability zero.

    Args:
        probs_BV: [B, V] non-negative, need not be normalised.
        uniforms_B: [B] in [0, 1).

    Returns:
        [B] int64 tokens.
    """
    batch, vocab = probs_BV.shape
    no_drafts_B0 = torch.empty(batch, 0, dtype=torch.int64, device=probs_BV.device)
    no_probs_B0V = probs_BV.new_empty(batch, 0, vocab)
    _, tokens_B1 = verify_chain(
        no_drafts_B0, no_probs_B0V, probs_BV[:, None], uniforms_B[:, None], check=False
    )
    return tokens_B1[:, 0]
