"""Acceptance along given text: what a decoder would draft from every row, without decoding.

Row t holds the backbone's state after token t. A decoder drafts from row t once token t+1 is
known: depth i then predicts token t+i+1 and meets the target distribution of row t+i. A draft
past the end of the text counts as not accepted, as in decoding, where the request is over.

Shape suffixes: G draft depths, B documents, T positions, R rows that are drafted from,
U distinct target rows, V vocabulary, H hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from bebop.decoding.acceptance import alpha_rs, alpha_to, entropy
from bebop.decoding.sampling import probs_from_logits
from bebop.errors import InputError
from bebop.models.backbone import Backbone
from bebop.models.mtp_head import MTPHead, draft_hidden

CHUNK_ELEMENTS = 2**23  # 32 MiB of fp32 logits a depth


@dataclass(frozen=True)
class Text:
    """One document: tokens, and which of them a response holds (1) or a prompt (0)."""

    tokens: tuple[int, ...]
    mask: tuple[int, ...]


@dataclass(frozen=True)
class Positions:
    """Statistics of every row that is drafted from, each [G, R] unless it says otherwise.

    Attributes:
        valid: token t+i+1 exists and belongs to the response, at every depth up to i.
        alpha_rs: rejection-sampling acceptance `1 - d_TV(p, q)` (arXiv 2606.12370 eq. 2).
        alpha_to: target-only acceptance `p(argmax q)` (eq. 1).
        step_rs: `min(1, q(y)/p(y))` at the text's own token y: the chance that rejection
            sampling walks along the text, given that the target does.
        step_to: 1 where `argmax q` is the text's own token.
        entropy_target: entropy of p, nats.
        entropy_draft: entropy of q, nats.
        kl: `KL(p || q)`, nats; infinite where a filter empties q under p.
        document: [R] index of the text.
        row: [R] t.
    """

    valid: Tensor
    alpha_rs: Tensor
    alpha_to: Tensor
    step_rs: Tensor
    step_to: Tensor
    entropy_target: Tensor
    entropy_draft: Tensor
    kl: Tensor
    document: Tensor
    row: Tensor

    def cumulative(self, sampler: str) -> Tensor:
        """[G, R] product of the acceptances up to a depth, 0 past the end of the text."""
        alpha_GR = self.alpha_rs if sampler == "rejection" else self.alpha_to
        return torch.where(self.valid, alpha_GR, 0.0).cumprod(dim=0)

    def on_path(self, sampler: str) -> Tensor:
        """[G, R] unbiased estimate of the cumulative acceptance on the drafts' own path.

        Text is drawn from p, drafts from q: weighting each step by `min(1, q/p)` makes
        `E_p[w_1 .. w_{i-1} alpha_i]` the probability that i drafts in a row are accepted.
        """
        rejection = sampler == "rejection"
        alpha_GR = self.alpha_rs if rejection else self.alpha_to
        step_GR = self.step_rs if rejection else self.step_to
        weight_GR = torch.cat([torch.ones_like(step_GR[:1]), step_GR[:-1].cumprod(dim=0)])
        return torch.where(self.valid, weight_GR * alpha_GR, 0.0)


def pad(texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """Tokens and masks [B, T], padded on the right with 0, which no causal row looks at."""
    length = max(len(text.tokens) for text in texts)
    tokens_BT = torch.zeros(len(texts), length, dtype=torch.int64)
    mask_BT = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens_BT[row, : len(text.tokens)] = torch.tensor(text.tokens)
        mask_BT[row, : len(text.mask)] = torch.tensor(text.mask)
    return tokens_BT, mask_BT


def trained_depths(mask_BT: Tensor, depths: int) -> Tensor:
    """Boolean [G, B, T]: tokens t+2 .. t+i+1 are all in the mask (and so inside the document)."""
    batch, length = mask_BT.shape
    ahead_BT = torch.cat([mask_BT != 0, mask_BT.new_zeros(batch, depths + 1).bool()], dim=1)
    shifted = [ahead_BT[:, i + 1 : i + 1 + length] for i in range(1, depths + 1)]
    return torch.stack(shifted).cumprod(dim=0).bool()


def drafted_depths(mask_BT: Tensor, depths: int) -> Tensor:
    """As `trained_depths`, only for rows whose next token is sampled: where decoding drafts."""
    sampled_BT = torch.zeros_like(mask_BT, dtype=torch.bool)
    sampled_BT[:, :-1] = mask_BT[:, 1:] != 0
    return trained_depths(mask_BT, depths) & sampled_BT


@dataclass(frozen=True)
class Rows:
    """The rows of a batch that take part, gathered before the vocabulary is touched.

    Attributes:
        index_R: flat index b*T + t of each row.
        target_GR: flat index of the row that holds the target, b*T + t + i.
        valid_GR: which depths exist.
    """

    index_R: Tensor
    target_GR: Tensor
    valid_GR: Tensor

    def chunks(self, size: int) -> Iterator["Rows"]:
        """Consecutive parts of at most `size` rows."""
        for start in range(0, len(self.index_R), size):
            part = slice(start, start + size)
            yield Rows(self.index_R[part], self.target_GR[:, part], self.valid_GR[:, part])


def gather_rows(valid_GBT: Tensor) -> Rows:
    """The rows whose first depth is valid."""
    depths, batch, length = valid_GBT.shape
    valid_GN = valid_GBT.reshape(depths, batch * length)
    index_R = valid_GN[0].nonzero().squeeze(-1)
    ahead_G = torch.arange(1, depths + 1, device=index_R.device).unsqueeze(-1)
    # A depth past the end has no target row of its own; any row will do, as it is masked.
    target_GR = (index_R + ahead_G).clamp(max=batch * length - 1)
    return Rows(index_R, target_GR, valid_GN[:, index_R])


def target_values(
    rows: Rows, hidden_NH: Tensor, values: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Per-row values of the target, computed once for each distinct target row.

    Args:
        rows: R rows.
        hidden_NH: backbone states of the flat batch.
        values: maps states [U, H] to something per row, e.g. probabilities [U, V].

    Returns:
        Values [U, ...] and the index [G, R] into them.
    """
    distinct_U, inverse_GR = rows.target_GR.unique(return_inverse=True)
    with torch.no_grad():
        return values(hidden_NH[distinct_U]), inverse_GR


def chunk_rows(vocabulary: int) -> int:
    """Rows whose logits are held at a time, so that memory does not grow with the batch."""
    return max(1, CHUNK_ELEMENTS // vocabulary)


@torch.no_grad()
def measure_positions(
    backbone: Backbone,
    head: MTPHead,
    texts: Sequence[Text],
    depths: int,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    batch_size: int = 16,
    hidden: Sequence[Tensor] | None = None,
) -> Positions:
    """Acceptance statistics of every drafted row of the texts.

    Args:
        backbone: the target model.
        head: the draft head.
        texts: documents; drafting is measured inside their responses only.
        depths: G.
        temperature: of both p and q; 0 is greedy.
        top_k: filter of both p and q; 0 keeps everything.
        top_p: filter of both p and q; 1 keeps everything.
        batch_size: documents a forward pass.
        hidden: backbone states [T, H] a document, when they are already known.

    Raises:
        InputError: no document has a row to draft from.
    """
    parts = []
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        known = hidden[start : start + batch_size] if hidden is not None else None
        parts += _measure_batch(
            backbone, head, batch, depths, known, start, (temperature, top_k, top_p)
        )
    if not parts:
        raise InputError(
            f"none of {len(texts)} responses is two tokens long, so nothing is drafted",
            where="measure_positions",
            fix="Check the stop tokens and the prompts' template; the model ends at once",
        )
    joined = {f.name: torch.cat([getattr(p, f.name) for p in parts], -1) for f in fields(Positions)}
    return Positions(**joined)


def _measure_batch(
    backbone: Backbone,
    head: MTPHead,
    texts: Sequence[Text],
    depths: int,
    known: Sequence[Tensor] | None,
    first_document: int,
    filters: tuple[float, int, float],
) -> list[Positions]:
    tokens_BT, mask_BT = (x.to(backbone.embed.weight.device) for x in pad(texts))
    rows = gather_rows(drafted_depths(mask_BT, depths))
    if not len(rows.index_R):
        return []
    hidden_BTH = backbone.hidden_states(tokens_BT) if known is None else pad_hidden(known)
    draft_GBTH = draft_hidden(head, backbone, tokens_BT, hidden_BTH, depths)
    draft_GNH, hidden_NH = draft_GBTH.flatten(1, 2), hidden_BTH.flatten(0, 1)
    size = chunk_rows(backbone.vocab_size)
    return [
        _measure_chunk(backbone, part, draft_GNH, hidden_NH, tokens_BT, first_document, filters)
        for part in rows.chunks(size)
    ]


def pad_hidden(states: Sequence[Tensor]) -> Tensor:
    """States [T_b, H] of several documents as [B, T, H], zero past the end."""
    return torch.nn.utils.rnn.pad_sequence(list(states), batch_first=True)


def _measure_chunk(
    backbone: Backbone,
    rows: Rows,
    draft_GNH: Tensor,
    hidden_NH: Tensor,
    tokens_BT: Tensor,
    first_document: int,
    filters: tuple[float, int, float],
) -> Positions:
    def probs(hidden: Tensor) -> Tensor:
        return probs_from_logits(backbone.logits(hidden), *filters)

    p_UV, inverse_GR = target_values(rows, hidden_NH, probs)
    tokens_N = tokens_BT.flatten()
    columns: dict[str, list[Tensor]] = {}
    for depth, (inverse_R, target_R) in enumerate(zip(inverse_GR, rows.target_GR, strict=True)):
        q_RV = probs(draft_GNH[depth, rows.index_R])
        next_R = tokens_N[(target_R + 1).clamp(max=len(tokens_N) - 1)]
        for name, value_R in _compare(p_UV[inverse_R], q_RV, next_R).items():
            columns.setdefault(name, []).append(value_R)
    length = tokens_BT.shape[1]
    return Positions(
        valid=rows.valid_GR,
        document=rows.index_R // length + first_document,
        row=rows.index_R % length,
        **{name: torch.stack(values) for name, values in columns.items()},
    )


def _compare(p_RV: Tensor, q_RV: Tensor, token_R: Tensor) -> dict[str, Tensor]:
    token_R1 = token_R.unsqueeze(-1)
    p_R, q_R = (x.gather(-1, token_R1).squeeze(-1) for x in (p_RV, q_RV))
    return {
        "alpha_rs": alpha_rs(p_RV, q_RV),
        "alpha_to": alpha_to(p_RV, q_RV),
        "step_rs": torch.where(p_R > 0, (q_R / p_R).clamp(max=1.0), 0.0),
        "step_to": (q_RV.argmax(dim=-1) == token_R).to(p_RV.dtype),
        "entropy_target": entropy(p_RV),
        "entropy_draft": entropy(q_RV),
        "kl": (torch.special.xlogy(p_RV, p_RV) - torch.special.xlogy(p_RV, q_RV)).sum(dim=-1),
    }
