"""Random models small enough to enumerate every text they can write."""

import itertools
import math

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bebop.decoding.sampling import probs_from_logits
from bebop.models.backbone import Backbone
from bebop.models.mtp_head import MTPHead, new_head

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
VOCAB = 11


def small_backbone(
    family: str = "llama", *, vocab: int = VOCAB, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Backbone:
    """Two layers, hidden 16; float64, so that a batch's shape cannot change a sampled token."""
    torch.manual_seed(seed)
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.4,
    )
    return Backbone(model_class(config).to(dtype).eval().requires_grad_(False))


def noisy_head(backbone: Backbone, *, scale: float = 0.2, seed: int = 1) -> MTPHead:
    """A head whose every part has an effect, attention included."""
    torch.manual_seed(seed)
    head = new_head(backbone)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += scale * torch.randn_like(parameter)
    return head.eval().requires_grad_(False)


def joint_law(
    backbone: Backbone, prompt: tuple[int, ...], length: int, filters: tuple[float, int, float]
) -> Tensor:
    """Probability of every continuation of `length` tokens, [V ** length], last token fastest."""
    texts = torch.tensor(list(itertools.product(range(backbone.vocab_size), repeat=length)))
    rows = torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], dim=1)
    hidden = backbone.hidden_states(rows)[:, len(prompt) - 1 : -1]
    probs = probs_from_logits(backbone.logits(hidden), *filters)
    return probs.gather(-1, texts[..., None])[..., 0].prod(-1)


def chi_square_p(counts: Tensor, law: Tensor, *, least: float = 5.0) -> float:
    """P-value of counts against a law; cells with fewer than `least` expected are pooled."""
    assert float(counts[law == 0].sum()) == 0, "a token of probability zero was emitted"
    expected = law.double() * counts.sum()
    small = expected < least
    observed = torch.cat([counts[~small].double(), counts[small].double().sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    if float(expected[-1]) < least:
        observed = torch.cat([observed[:-2], observed[-2:].sum()[None]])
        expected = torch.cat([expected[:-2], expected[-2:].sum()[None]])
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    p_value = float(torch.special.gammaincc(freedom, statistic / 2))
    assert math.isfinite(p_value)
    return p_value
