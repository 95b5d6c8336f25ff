"""The gate: tokens that the engine emits follow the target exactly, or the stage fails.

Two tests, for each sampler:

- *enumeration*: a random model with a vocabulary of `VOCABULARY` tokens is decoded many times
  with the run's temperature and filters, and at most `MOST_DRAFTS` drafts. Every possible text is
  a cell, its exact probability comes from the backbone alone, and Pearson's chi-square compares.
  Texts are two tokens longer than a chain of drafts: one comes from the prompt's own pass, and
  the last is a bonus token, or belongs to the next round.
- *transform*: on the run's own model. For a token y at a place with target p, the number
  `u = p(tokens likelier than y) + v p(y)`, v uniform, is uniform on [0, 1) and independent of
  all earlier ones exactly when y was drawn from p. A chi-square over `BINS` bins compares.

Each test raises a false alarm with probability `FAILURE`; there are four of them.

Shape suffixes: R rows, V vocabulary, C cells.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop.decoding.sampling import probs_from_logits
from bebop.decoding.teacher_forced import Text, chunk_rows, pad
from bebop.errors import LosslessnessError
from bebop.models.backbone import Backbone
from bebop.models.mtp_head import MTPHead, new_head
from bebop.rollout.engine import Mode, Request, SamplingParams, Speculation
from bebop.rollout.torch_engine import TorchEngine

FAILURE = 1e-6
VOCABULARY, MOST_DRAFTS = 3, 3
BINS = 20
SMALLEST_EXPECTED = 5.0
SLOTS = 512
PROMPT = (1, 2)
# Between a head that is accepted always and one that is accepted never, where a wrong residual
# and a wrong bonus row both show: five ways to be wrong are found at p < 1e-7 in 4000 draws.
HEAD_NOISE, MODEL_SEED = 0.2, 0


@dataclass(frozen=True)
class Check:
    """One test's outcome.

    Attributes:
        name: "enumeration" or "transform".
        mode: sampler.
        p_value: probability of a chi-square at least this large when all is well.
        draws: texts (enumeration) or tokens (transform).
        largest_logprob_error: worst difference between the engine's log p and the backbone's
            own; only the transform knows it.
    """

    name: str
    mode: Mode
    p_value: float
    draws: int
    largest_logprob_error: float = 0.0

    @property
    def passed(self) -> bool:
        return self.p_value >= FAILURE


def require_lossless(tests: Sequence[Check]) -> None:
    """Raise for the first test that failed.

    Raises:
        LosslessnessError: with the sampler, the test and its p-value.
    """
    for test in tests:
        if not test.passed:
            raise LosslessnessError(
                f"tokens emitted with {test.mode} do not follow the target: chi-square "
                f"p = {test.p_value:.1e} over {test.draws} draws ({test.name} test)",
                where="diagnosis",
                fix="Do not roll out with this engine and sampler; rollouts would be biased. "
                "Likely causes: the verifier's residual, shared random streams, or filters that "
                "differ between draft and target",
            )


def small_model(seed: int) -> tuple[Backbone, MTPHead]:
    """A random Llama with a head that is neither equal to it nor unrelated.

    The same one in every run, so that what the gate can find does not depend on luck.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    backbone = Backbone(LlamaForCausalLM(config).eval().requires_grad_(False))
    head = new_head(backbone)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(HEAD_NOISE * torch.randn_like(parameter))
    torch.set_rng_state(generator_state)
    return backbone, head.eval().requires_grad_(False)


def enumeration_test(
    mode: Mode, gamma: int, sampling: SamplingParams, draws: int, seed: int
) -> Check:
    """Decode a small model `draws` times and compare with every text's exact probability."""
    backbone, head = small_model(MODEL_SEED)
    gamma = min(gamma, MOST_DRAFTS)
    length = gamma + 2
    sampling = SamplingParams(
        sampling.temperature, sampling.top_k, sampling.top_p, max_tokens=length
    )
    engine = TorchEngine(
        backbone,
        head,
        speculation=Speculation(mode, gamma),
        max_batch=SLOTS,
        max_length=2 + length + gamma + 2,
    )
    requests = [Request(str(i), PROMPT, sampling, seed=seed * draws + i) for i in range(draws)]
    counts = Counter(tuple(completion.tokens) for completion in engine.generate(requests))
    exact_C = text_probabilities(backbone, PROMPT, sampling)
    cells = itertools.product(range(VOCABULARY), repeat=length)
    observed_C = torch.tensor([counts[cell] for cell in cells], dtype=torch.float64)
    return Check("enumeration", mode, chi_square_p(observed_C, draws * exact_C), draws)


@torch.no_grad()
def text_probabilities(
    backbone: Backbone, prompt: tuple[int, ...], sampling: SamplingParams
) -> Tensor:
    """Exact probability of every text of `max_tokens` tokens, in lexicographic order, fp64."""
    texts = list(itertools.product(range(backbone.vocab_size), repeat=sampling.max_tokens))
    tokens_CT = torch.tensor([prompt + text for text in texts])
    p_CTV = _target(backbone, backbone.hidden_states(tokens_CT), sampling).double()
    start = len(prompt)
    p_CL = p_CTV[:, start - 1 : -1].gather(-1, tokens_CT[:, start:, None]).squeeze(-1)
    return p_CL.prod(dim=-1)


def _target(backbone: Backbone, hidden: Tensor, sampling: SamplingParams) -> Tensor:
    logits = backbone.logits(hidden)
    return probs_from_logits(logits, sampling.temperature, sampling.top_k, sampling.top_p)


def chi_square_p(observed_C: Tensor, expected_C: Tensor) -> float:
    """p-value of Pearson's chi-square; cells that are too rare for it are pooled.

    A count in a cell of probability 0 gives p = 0, whatever the rest says.
    """
    if bool(observed_C[expected_C <= 0].any()):
        return 0.0
    observed, expected = _pool_rare(observed_C, expected_C)
    if len(observed) < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor(len(observed) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


def _pool_rare(observed_C: Tensor, expected_C: Tensor) -> tuple[Tensor, Tensor]:
    """Join the cells below `SMALLEST_EXPECTED`, and the rarest common one if that is too few."""
    rare_C = expected_C < SMALLEST_EXPECTED
    if not bool(rare_C.any()):
        return observed_C, expected_C
    if float(expected_C[rare_C].sum()) < SMALLEST_EXPECTED and not bool(rare_C.all()):
        rare_C[expected_C.masked_fill(rare_C, torch.inf).argmin()] = True
    observed, expected = (
        torch.cat([x[~rare_C], x[rare_C].sum().unsqueeze(0)]) for x in (observed_C, expected_C)
    )
    return observed, expected


@torch.no_grad()
def transform_test(
    backbone: Backbone,
    mode: Mode,
    texts: Sequence[Text],
    logprobs: Sequence[Sequence[float]],
    sampling: SamplingParams,
    seed: int,
    batch_size: int = 16,
) -> Check:
    """Compare emitted responses with the run's own model, scored without speculation."""
    generator = torch.Generator().manual_seed(seed)
    places, worst = [], 0.0
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        below_R, p_R = _score(backbone, batch, sampling)
        v_R = torch.rand(len(p_R), generator=generator, dtype=torch.float64)
        places.append(below_R + v_R * p_R)
        given = [value for row in logprobs[start : start + batch_size] for value in row]
        errors_R = (p_R.clamp(min=1e-30).log() - torch.tensor(given, dtype=torch.float64)).abs()
        worst = max(worst, float(errors_R.max()))
    u_R = torch.cat(places)
    observed = torch.bincount((u_R * BINS).long().clamp(0, BINS - 1), minlength=BINS).double()
    p_value = chi_square_p(observed, torch.full((BINS,), len(u_R) / BINS, dtype=torch.float64))
    return Check("transform", mode, p_value, len(u_R), worst)


def _score(
    backbone: Backbone, texts: Sequence[Text], sampling: SamplingParams
) -> tuple[Tensor, Tensor]:
    """For every response token, in order: the mass of the likelier tokens, and its own (fp64)."""
    tokens_BT, mask_BT = (x.to(backbone.device) for x in pad(texts))
    hidden_BTH = backbone.hidden_states(tokens_BT)
    sampled_BT = mask_BT[:, 1:] != 0
    hidden_RH, token_R = hidden_BTH[:, :-1][sampled_BT], tokens_BT[:, 1:][sampled_BT]
    below, own = [], []
    size = chunk_rows(backbone.vocab_size)
    for hidden, token in zip(hidden_RH.split(size), token_R.split(size), strict=True):
        p_RV = _target(backbone, hidden, sampling)
        p_R1 = p_RV.gather(-1, token[:, None])
        order_V = torch.arange(p_RV.shape[-1], device=p_RV.device)
        # Tokens of equal probability keep the order of their ids, so that none is counted twice.
        before_RV = (p_RV > p_R1) | ((p_RV == p_R1) & (order_V < token[:, None]))
        below.append((p_RV.double() * before_RV).sum(dim=-1).cpu())
        own.append(p_R1.squeeze(-1).double().cpu())
    return torch.cat(below), torch.cat(own)
