"""The draft-verify loop over slots; plain decoding is the case of no drafts.

One round, for a request with known tokens x_0 .. x_{n-1} (the newest has no trunk row yet) and
gamma = 2:

    head   rows up to n-2 (new ones only)    x_{n-1} embedded in row n-2  -> draft d_1 for x_n
           row n-1 (provisional)             d_1 embedded, own state fed  -> draft d_2 for x_{n+1}
    trunk  x_{n-1}, d_1, d_2 at positions n-1, n, n+1    -> p of x_n, x_{n+1}, x_{n+2}
    verify accept a prefix of the drafts, emit one more token

Provisional and rejected rows are written over when the true rows are known.

Shape suffixes: B rows (requests), G drafts, T rows of a pass, H hidden, V vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bebop.decoding.passes import Passes
from bebop.decoding.sampling import one_hot, probs_from_logits, sample, seed_key, uniforms
from bebop.decoding.slots import UNFILTERED, Filters, Span
from bebop.errors import LosslessnessError
from bebop.models.backbone import Backbone
from bebop.models.mtp_head import MTPHead
from bebop_kernels.rejection import verify_chain

SAMPLER_BYTES = 1 << 29
MIN_SHARED = 8  # tokens; copying a shorter prefix is not worth a pass of its own


@dataclass(frozen=True)
class Admission:
    """A prompt to start: tokens, seed (any integer), filters."""

    prompt: tuple[int, ...]
    seed: int
    filters: Filters = UNFILTERED


@dataclass
class Emission:
    """New tokens, one entry a slot in slot order.

    Attributes:
        tokens: what was emitted: the accepted drafts and one more token.
        logprobs: log p of each, under the distribution it was sampled from.
        drafts: drafts a slot.
    """

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    drafts: int = 0


class Decoder:
    """Continuous batching over a fixed number of slots.

    Requests enter by `admit`, advance together by `round`, leave by `release`; the active ones
    are always slots 0 .. active-1. A request's tokens depend on its prompt, seed and filters and
    on the rounds' gamma, not on its batch (up to the rounding of the matrix products).
    """

    def __init__(self, backbone: Backbone, head: MTPHead | None = None, *, slots: int = 32):
        self.backbone, self.head = backbone, head
        self.capacity, self.active = slots, 0
        self.passes = Passes(backbone, head, slots)
        self.seconds: dict[str, float] = {}
        self.prompt_tokens = 0

    @torch.inference_mode()
    def admit(
        self, admissions: Sequence[Admission], *, with_head: bool = False
    ) -> tuple[list[int], Emission]:
        """Start requests in the next free slots and sample their first tokens.

        A prompt that several of them share, or that an active slot holds, is computed once.

        Args:
            admissions: at most `capacity - active`.
            with_head: run the head over the prompts too (else it catches up when it drafts).

        Returns:
            For each newly taken slot the index into `admissions`; and the first tokens.
        """
        assert self.active + len(admissions) <= self.capacity
        with self._timed("prefill"):
            order, sources = self._place(admissions)
            lengths = [len(admissions[i].prompt) for i in order]
            fresh = lengths[: len(order) - len(sources)]
            for span in self.passes.prompt_spans(self.active, fresh):
                rows_B = self.passes.slots.length_N[span.slots]
                self.passes.prompt(span, rows_B, *self._common_prefix(span))
                if with_head and self.head is not None:
                    self.passes.head_catch_up(span, rows_B - 1)
            for target, source in sources.items():
                self.passes.share_prompt(source, target, lengths[target - self.active])
        self.prompt_tokens += sum(fresh)
        span = Span(self.active, len(order))
        self.active += len(order)
        return order, self._first_tokens(span)

    def _place(self, admissions: Sequence[Admission]) -> tuple[list[int], dict[int, int]]:
        """Fill slots, new prompts first and by length; also return copies, target -> source."""
        slots = self.passes.slots
        holder = {slots.prompts[slot]: slot for slot in range(self.active)}
        fresh: dict[tuple[int, ...], int] = {}
        copies: list[int] = []
        for index, admission in enumerate(admissions):
            if admission.prompt in holder or admission.prompt in fresh:
                copies.append(index)
            else:
                fresh[admission.prompt] = index
        order = sorted(fresh.values(), key=lambda i: len(admissions[i].prompt)) + copies
        sources = {}
        for slot, index in enumerate(order, start=self.active):
            admission = admissions[index]
            slots.fill(slot, admission.prompt, seed_key(admission.seed), admission.filters)
            if slot - self.active >= len(fresh):
                sources[slot] = holder[admission.prompt]
            holder.setdefault(admission.prompt, slot)
        return order, sources

    def _common_prefix(self, span: Span) -> tuple[int, int]:
        """Slot to take a prefix from, and its length: of an active request, or else computed
        once in the span itself (a chat template's system text is the usual case)."""
        prompts = self.passes.slots.prompts
        own = prompts[span.slots]
        # The extremes in lexical order differ at least as early as any other pair.
        prefix = _leading(min(own), max(own))[: min(map(len, own)) - 1]
        found = [len(_leading(prefix, prompts[slot])) for slot in range(self.active)]
        longest = max(found, default=0)
        if longest >= max(MIN_SHARED, len(prefix) // 2):
            return found.index(longest), longest
        if len(prefix) >= MIN_SHARED and span.count > 1:
            return span.first, len(prefix)
        return span.first, 0

    def _first_tokens(self, span: Span) -> Emission:
        slots = self.passes.slots
        emission = Emission()
        for part in self._parts(span, 0):
            with self._timed("prefill"):
                last_B = slots.length_N[part.slots] - 1
                rows_B = torch.arange(part.first, part.first + part.count, device=last_B.device)
                hidden_B1H = slots.hidden_NLH[rows_B, last_B][:, None]
                p_B1V = self._probs(part, self.backbone.logits(hidden_B1H))
                self._emit(part, *self._plain(part, p_B1V), p_B1V, emission)
        return emission

    @torch.inference_mode()
    def round(self, gamma: int = 0, *, greedy: bool = False) -> Emission:
        """Advance every active request by one round.

        Args:
            gamma: drafts a request; 0 decodes plainly.
            greedy: draft the likeliest token (target-only acceptance) instead of sampling it.
        """
        emission = Emission(drafts=gamma)
        for span in self._parts(Span(0, self.active), gamma):
            rows_BT = self._newest(span)
            if gamma > 0:
                with self._timed("draft"):
                    drafts_BG, q_BGV = self._draft(span, gamma, greedy)
                rows_BT = torch.cat([rows_BT, drafts_BG], dim=1)
            with self._timed("verify"):
                hidden_BTH = self.passes.trunk_rows(span, rows_BT)
            with self._timed("lm_head"):
                logits_BTV = self.backbone.logits(hidden_BTH)
            with self._timed("sample"):
                p_BTV = self._probs(span, logits_BTV)
                if gamma > 0:
                    accepted_B, tokens_BT = self._verify(span, drafts_BG, q_BGV, p_BTV)
                else:
                    accepted_B, tokens_BT = self._plain(span, p_BTV)
                self._emit(span, accepted_B, tokens_BT, p_BTV, emission)
        return emission

    @torch.inference_mode()
    def release(self, slot: int) -> int:
        """Free a slot; the last active request moves into it. Returns that request's old slot."""
        last = self.active - 1
        if slot != last:
            self.passes.move(last, slot)
        self.active = last
        return last

    @torch.inference_mode()
    def recompute(self) -> None:
        """Rebuild all stored states under the weights as they are now."""
        rows = (self.passes.slots.length_N[: self.active] - 1).tolist()
        for span in self.passes.prompt_spans(0, rows):
            self.passes.prompt(span, self.passes.slots.length_N[span.slots] - 1)

    def forget_prompts(self) -> None:
        """Let no later request share the states of those that are active now."""
        self.passes.slots.prompts[: self.active] = [()] * self.active

    @torch.inference_mode()
    def forget_head(self) -> None:
        """Let the head run anew over all rows, e.g. after its weights changed."""
        self.passes.slots.head_rows_N.zero_()

    def _newest(self, span: Span) -> Tensor:
        slots = self.passes.slots
        return slots.tokens_NL[span.slots].gather(1, slots.length_N[span.slots, None] - 1)

    def _draft(self, span: Span, gamma: int, greedy: bool) -> tuple[Tensor, Tensor]:
        """Tokens [B, G] and the distributions [B, G, V] they were drawn from."""
        slots = self.passes.slots
        length_B, seed_B = slots.length_N[span.slots], slots.seed_N[span.slots]
        state_BH = self.passes.head_catch_up(span, length_B - 1)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for depth in range(1, gamma + 1):
            if depth > 1:
                state_BH = self.passes.head_next(span, tokens[-1], state_BH, depth)
            logits_BV = self.backbone.logits(state_BH)
            if greedy:
                token_B = logits_BV.argmax(-1)
                probs.append(one_hot(token_B, logits_BV.shape[-1], torch.float32))
            else:
                q_BV = self._probs(span, logits_BV[:, None])[:, 0]
                token_B = sample(q_BV, uniforms(seed_B, length_B + depth - 1, "draft"))
                probs.append(q_BV)
            tokens.append(token_B)
        return torch.stack(tokens, dim=1), torch.stack(probs, dim=1)

    def _verify(
        self, span: Span, drafts_BG: Tensor, q_BGV: Tensor, p_BTV: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Accepted drafts [B] and emitted tokens [B, G + 1]."""
        slots = self.passes.slots
        seed_B1, length_B1 = slots.seed_N[span.slots, None], slots.length_N[span.slots, None]
        offsets_G = torch.arange(drafts_BG.shape[1], device=drafts_BG.device)
        uniforms_BT = torch.cat(
            [
                uniforms(seed_B1, length_B1 + offsets_G, "accept"),
                # One such draw a round, whichever position it ends up deciding.
                uniforms(seed_B1, length_B1, "residual"),
            ],
            dim=1,
        )
        # `_probs` has checked p and q already.
        return verify_chain(drafts_BG, q_BGV, p_BTV, uniforms_BT, check=False)

    def _plain(self, span: Span, p_B1V: Tensor) -> tuple[Tensor, Tensor]:
        slots = self.passes.slots
        u_B = uniforms(slots.seed_N[span.slots], slots.length_N[span.slots], "residual")
        tokens_B1 = sample(p_B1V[:, 0], u_B)[:, None]
        return torch.zeros_like(tokens_B1[:, 0]), tokens_B1

    def _emit(
        self,
        span: Span,
        accepted_B: Tensor,
        tokens_BT: Tensor,
        p_BTV: Tensor,
        emission: Emission,
    ) -> None:
        """Write the new tokens into their slots and append them to `emission`."""
        logprobs_BT = _log_p(p_BTV, tokens_BT)
        slots = self.passes.slots
        width = tokens_BT.shape[1]
        slots.reserve(slots.longest(span) + width)
        offsets_T = torch.arange(width, device=tokens_BT.device)
        positions_BT = slots.length_N[span.slots, None] + offsets_T
        slots.tokens_NL[span.slots].scatter_(1, positions_BT, tokens_BT.clamp_min(0))
        slots.length_N[span.slots] += accepted_B + 1
        counts = (accepted_B + 1).tolist()
        rows = zip(tokens_BT.tolist(), logprobs_BT.tolist(), counts, strict=True)
        for tokens, logprobs, count in rows:
            emission.tokens.append(tokens[:count])
            emission.logprobs.append(logprobs[:count])

    def _probs(self, span: Span, logits_BTV: Tensor) -> Tensor:
        """Distribution of each row under its own request's filters."""
        filters = self.passes.slots.filters[span.slots]
        if len(set(filters)) == 1:
            probs_BTV = probs_from_logits(logits_BTV, *filters[0])
        else:
            rows = [probs_from_logits(logits_BTV[b], *own) for b, own in enumerate(filters)]
            probs_BTV = torch.stack(rows)
        _check_normalised(probs_BTV)
        return probs_BTV

    def _parts(self, span: Span, gamma: int) -> Iterator[Span]:
        """Cut a span so that p, q and the logits stay within `SAMPLER_BYTES`."""
        rows = 3 * (gamma + 1)
        size = max(1, SAMPLER_BYTES // (rows * self.backbone.vocab_size * 4))
        for first in range(span.first, span.first + span.count, size):
            yield Span(first, min(size, span.first + span.count - first))

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.backbone.device.type == "cuda":
            torch.cuda.synchronize(self.backbone.device)
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


def _leading(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Longest common prefix."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return a[:index]
    return a[: len(b)]


def _log_p(p_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    return p_BTV.gather(-1, tokens_BT.clamp_min(0)[..., None])[..., 0].log()


def _check_normalised(probs_BTV: Tensor) -> None:
    """Sampling from anything but a distribution would bias the text and raise nothing."""
    worst = (probs_BTV.sum(-1) - 1.0).abs().max()
    if not bool(worst < 1e-3):
        raise LosslessnessError(
            f"probabilities do not sum to 1 (off by {float(worst):.3g})",
            where="decoding",
            fix="The model or its head holds NaN or was damaged on its way here; reload it",
        )
