"""The diagnosis' figures against sums over every possible text of a small model."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.decoding.loop import Admission, Decoder
from bebop.decoding.slots import Filters
from bebop.decoding.teacher_forced import Text, measure_positions
from bebop.diagnosis.analysis import analyse
from bebop.diagnosis.losslessness import small_model, text_probabilities
from bebop.models.backbone import Backbone
from bebop.models.mtp_head import MTPHead, draft_hidden
from bebop.rollout.engine import SamplingParams

PROMPT = (1, 2)
DEPTHS = 2
TEMPERATURE = 0.8


def every_text(vocabulary: int) -> list[Text]:
    """First token, then one token a depth."""
    mask = (0,) * len(PROMPT) + (1,) * (1 + DEPTHS)
    rest = itertools.product(range(vocabulary), repeat=DEPTHS + 1)
    return [Text(PROMPT + tokens, mask) for tokens in rest]


def accepted_chain(backbone: Backbone, head: MTPHead, greedy: bool) -> list[float]:
    """P(drafts 1..i accepted), i = 1..DEPTHS, in the round after the first token.

    A draft d at depth i is proposed and accepted with probability min(p_i(d), q_i(d)), or p_i(d)
    for the greedy one; p and q come from the drafts' own context.
    """
    total = [0.0] * DEPTHS
    for text in every_text(backbone.vocab_size):
        tokens_1T = torch.tensor([text.tokens])
        hidden_1TH = backbone.hidden_states(tokens_1T)
        draft_G1TH = draft_hidden(head, backbone, tokens_1T, hidden_1TH, DEPTHS)
        row = len(PROMPT) - 1

        def probs(hidden: Tensor) -> Tensor:
            return torch.softmax(backbone.logits(hidden) / TEMPERATURE, -1)

        weight = float(probs(hidden_1TH[0, row])[text.tokens[row + 1]])
        for depth in range(1, DEPTHS + 1):
            q_V, p_V = probs(draft_G1TH[depth - 1, 0, row]), probs(hidden_1TH[0, row + depth])
            draft = text.tokens[row + depth + 1]
            drawn = float(draft == int(q_V.argmax())) if greedy else float(q_V[draft])
            weight *= min(float(p_V[draft]), drawn)
            # Deeper tokens of the text are summed over, so each prefix appears that many times.
            total[depth - 1] += weight / backbone.vocab_size ** (DEPTHS - depth)
    return total


@pytest.mark.parametrize("sampler", ["rejection", "target_only"])
def test_path_figures_equal_the_exact_acceptance(sampler: str) -> None:
    backbone, head = small_model(0)
    texts = every_text(backbone.vocab_size)
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=DEPTHS + 1)
    probability_N = text_probabilities(backbone, PROMPT, sampling)
    positions = measure_positions(backbone, head, texts, DEPTHS, temperature=TEMPERATURE)
    first_R = positions.row == len(PROMPT) - 1
    assert int(first_R.sum()) == len(texts)
    weight_R = probability_N[positions.document[first_R]]
    measured_G = (positions.on_path(sampler)[:, first_R].double() * weight_R).sum(-1)
    exact = accepted_chain(backbone, head, greedy=sampler == "target_only")
    assert measured_G.tolist() == pytest.approx(exact, abs=1e-5)
    if sampler == "target_only":
        # The text's own tokens are no path that greedy drafts take: the plain product differs.
        product_G = (positions.cumulative(sampler)[:, first_R].double() * weight_R).sum(-1)
        assert abs(float(product_G[1]) - exact[1]) > 1e-3


@pytest.mark.parametrize("greedy", [False, True])
def test_decoding_accepts_as_often_as_the_exact_sum_says(greedy: bool) -> None:
    backbone, head = small_model(0)
    draws = 3000
    admissions = [Admission(PROMPT, seed, Filters(TEMPERATURE)) for seed in range(draws)]
    accepted: list[int] = []
    for start in range(0, draws, 500):
        decoder = Decoder(backbone, head, slots=500)
        decoder.admit(admissions[start : start + 500], with_head=True)
        accepted += [len(tokens) - 1 for tokens in decoder.round(DEPTHS, greedy=greedy).tokens]
    exact = accepted_chain(backbone, head, greedy)
    for depth, share in enumerate(exact, start=1):
        measured = np.mean(np.array(accepted) >= depth)
        assert measured == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / draws))


def test_conditional_figures_are_means_over_the_rows() -> None:
    backbone, head = small_model(0)
    texts = every_text(backbone.vocab_size)
    positions = measure_positions(backbone, head, texts, DEPTHS, temperature=TEMPERATURE)
    analysis = analyse(positions, np.arange(len(texts)) // 3, 200, seed=0)
    p_q = []
    for text in texts:
        tokens_1T = torch.tensor([text.tokens])
        hidden_1TH = backbone.hidden_states(tokens_1T)
        draft_G1TH = draft_hidden(head, backbone, tokens_1T, hidden_1TH, 1)
        # The last row that is drafted from predicts the last token: rows 1 and 2 of 5 tokens.
        for row in (1, 2):
            p_V = torch.softmax(backbone.logits(hidden_1TH[0, row + 1]) / TEMPERATURE, -1)
            q_V = torch.softmax(backbone.logits(draft_G1TH[0, 0, row]) / TEMPERATURE, -1)
            p_q.append((p_V, q_V))
    alpha = np.mean([float(torch.minimum(p, q).sum()) for p, q in p_q])
    greedy = np.mean([float(p[q.argmax()]) for p, q in p_q])
    entropy = np.mean([float(torch.special.entr(p).sum()) for p, _ in p_q])
    side = np.mean([float(torch.minimum(p, q).sum()) > float(p[q.argmax()]) for p, q in p_q])
    figures = analysis.figures
    assert analysis.rows == 2 * len(texts)
    assert figures["rejection"].alpha[0].mean == pytest.approx(alpha, abs=1e-5)
    assert figures["target_only"].alpha[0].mean == pytest.approx(greedy, abs=1e-5)
    assert analysis.entropy.mean == pytest.approx(entropy, abs=1e-5)
    assert analysis.boundary[0].positions.mean == pytest.approx(side)
    assert figures["rejection"].length.mean == pytest.approx(
        1 + sum(x.mean for x in figures["rejection"].cumulative)
    )
