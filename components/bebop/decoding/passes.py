"""The model passes that decoding is made of, each over a span of slots.

Shape suffixes: B rows (requests), T rows of a pass, S stored positions, H hidden, N slots.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from bebop.decoding.cache import SlotCache
from bebop.decoding.slots import Slots, Span
from bebop.models.backbone import Backbone
from bebop.models.mtp_head import MTPHead

PROMPT_ROWS = 4096


class Passes:
    """Trunk and head over slots: caches and trunk states are kept in step with the tokens."""

    def __init__(self, backbone: Backbone, head: MTPHead | None, count: int) -> None:
        self.backbone, self.head = backbone, head
        self.slots = Slots(count, backbone.hidden_size, backbone.dtype, backbone.device)
        self.trunk_cache = SlotCache(backbone.config.num_hidden_layers, count)
        self.head_cache = SlotCache(1, count)

    def prompt(self, span: Span, rows_B: Tensor, source: int = -1, shared: int = 0) -> None:
        """Trunk over the first rows_B known tokens of each slot, from scratch.

        Args:
            span: the slots.
            rows_B: rows to compute.
            source: slot that holds the states of the first `shared` tokens; when it is the
                span's first slot they are computed there once.
            shared: leading tokens that all slots of the span and the source have in common.
        """
        if shared > 0:
            if source == span.first:
                self._prompt_rows(Span(source, 1), 0, shared)
            for slot in range(span.first, span.first + span.count):
                if slot != source:
                    self._copy_trunk(source, slot, shared)
        self._prompt_rows(span, shared, int(rows_B.max()))
        self.slots.head_rows_N[span.slots] = 0

    def _prompt_rows(self, span: Span, start: int, stop: int) -> None:
        """Trunk over rows start .. stop-1 of every slot; earlier rows must be stored."""
        tokens_BT = self.slots.tokens_NL[span.slots, start:stop]
        positions_1T = torch.arange(start, stop, device=tokens_BT.device)[None]
        if start == 0:
            self.trunk_cache.plan_prompts(span.first, span.count, stop)
        else:
            self.trunk_cache.plan_rows(span.first, positions_1T.expand(span.count, -1), stop)
        self.slots.hidden_NLH[span.slots, start:stop] = self.backbone.hidden_states(
            tokens_BT,
            positions=positions_1T,
            mask=_mask(positions_1T, stop, self.backbone.dtype),
            cache=self.trunk_cache,
        )

    def _copy_trunk(self, source: int, target: int, rows: int) -> None:
        self.trunk_cache.copy(source, target, rows)
        self.slots.hidden_NLH[target, :rows] = self.slots.hidden_NLH[source, :rows]

    def trunk_rows(self, span: Span, tokens_BT: Tensor) -> Tensor:
        """Trunk over each slot's newest token and its drafts; returns their states [B, T, H]."""
        width = tokens_BT.shape[1]
        offsets_T = torch.arange(width, device=tokens_BT.device)
        positions_BT = self.slots.length_N[span.slots, None] - 1 + offsets_T
        stored = self.slots.longest(span) - 1 + width
        self.slots.reserve(stored + 1)
        self.trunk_cache.plan_rows(span.first, positions_BT, stored)
        hidden_BTH = self.backbone.hidden_states(
            tokens_BT,
            positions=positions_BT,
            mask=_mask(positions_BT, stored, self.backbone.dtype),
            cache=self.trunk_cache,
        )
        slots_B1 = torch.arange(span.first, span.first + span.count, device=tokens_BT.device)
        self.slots.hidden_NLH[slots_B1[:, None], positions_BT] = hidden_BTH
        return hidden_BTH

    def head_catch_up(self, span: Span, upto_B: Tensor) -> Tensor:
        """Head, depth 1, over the rows it has not seen below upto_B.

        Returns:
            [B, H] its output at row upto_B - 1 (meaningless where there was nothing to do).
        """
        assert self.head is not None
        slots = self.slots
        start_B = slots.head_rows_N[span.slots]
        count_B = upto_B - start_B
        width = int(count_B.max())
        if width == 0:
            return slots.hidden_NLH[span.slots, 0]
        offsets_T = torch.arange(width, device=upto_B.device)
        stored = int(upto_B.max()) + 1
        slots.reserve(stored + 1)
        # A shorter slot's surplus rows go to the last stored position, which no row sees yet.
        rows_BT = (start_B[:, None] + offsets_T).where(offsets_T < count_B[:, None], stored - 1)
        slots_B1 = torch.arange(span.first, span.first + span.count, device=upto_B.device)[:, None]
        self.head_cache.plan_rows(span.first, rows_BT, stored)
        state_BTH = self.head(
            self.backbone.embed(slots.tokens_NL[slots_B1, rows_BT + 1]),
            slots.hidden_NLH[slots_B1, rows_BT],
            positions=rows_BT,
            mask=_mask(rows_BT, stored, self.backbone.dtype),
            cache=self.head_cache,
        )
        slots.head_rows_N[span.slots] = upto_B
        rows_B = torch.arange(span.count, device=upto_B.device)
        return state_BTH[rows_B, (count_B - 1).clamp_min(0)]

    def head_next(self, span: Span, tokens_B: Tensor, state_BH: Tensor, depth: int) -> Tensor:
        """Head at a depth above 1: one provisional row a slot, fed its own last state."""
        assert self.head is not None
        positions_B1 = self.slots.length_N[span.slots, None] - 3 + depth
        stored = self.slots.longest(span) - 2 + depth
        self.head_cache.plan_rows(span.first, positions_B1, stored)
        state_B1H = self.head(
            self.backbone.embed(tokens_B[:, None]),
            state_BH[:, None],
            positions=positions_B1,
            mask=_mask(positions_B1, stored, self.backbone.dtype),
            cache=self.head_cache,
        )
        return state_B1H[:, 0]

    def share_prompt(self, source: int, target: int, rows: int) -> None:
        """Give `target` the states of `source` for the first `rows` tokens, which are equal."""
        slots = self.slots
        self._copy_trunk(source, target, rows)
        # The head's row t is made with token t + 1, and only rows - 1 of those are shared.
        done = min(int(slots.head_rows_N[source]), rows - 1)
        self.head_cache.copy(source, target, done)
        slots.head_rows_N[target] = done

    def move(self, source: int, target: int) -> None:
        """Move a request to another slot."""
        rows = int(self.slots.length_N[source])
        self.slots.move(source, target)
        self.trunk_cache.copy(source, target, min(rows, self.trunk_cache.length))
        self.head_cache.copy(source, target, min(rows, self.head_cache.length))

    def prompt_spans(self, first: int, rows: list[int]) -> Iterator[Span]:
        """Cut neighbouring slots into spans of at most `PROMPT_ROWS` padded rows."""
        start, longest = 0, 0
        for index, length in enumerate(rows):
            longest = max(longest, length)
            if index > start and (index + 1 - start) * longest > PROMPT_ROWS:
                yield Span(first + start, index - start)
                start, longest = index, length
        if rows:
            yield Span(first + start, len(rows) - start)


def _mask(positions_BT: Tensor, stored: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, T, S]: a row sees the positions up to its own.

    Additive, because torch would turn a boolean mask into this one in every layer.
    """
    keys_S = torch.arange(stored, device=positions_BT.device)
    hidden_BTS = keys_S > positions_BT[..., None]
    mask_BTS = torch.zeros(hidden_BTS.shape, dtype=dtype, device=positions_BT.device)
    return mask_BTS.masked_fill_(hidden_BTS, -torch.inf)[:, None]
