"""Keys and values of many requests in preallocated slots, with a write position per row.

    slot 0  [k k k k k . . . .]    active requests are slots 0 .. n-1, so that a batch is
    slot 1  [k k k . . . . . .]    always the view [:n, :longest] and never a copy;
    slot 2  [k k k k k k k . .]    when a request ends, the last active slot moves into
    slot 3  [. . . . . . . . .]    its place.

Positions past a request's length may hold rejected drafts or padding: no mask lets a row look
there before the true row has been written over it.

Shape suffixes: B rows, T new tokens, S stored positions, K key/value heads, D head dimension.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

_GRAIN = 64


@dataclass(frozen=True)
class Plan:
    """Where the next forward pass reads and writes.

    Attributes:
        first, count: the slots of its rows.
        cells: [B * T] flat index (slot * length + position) of each new key; None means that
            the rows start at position 0 and see only each other (a prompt).
        longest: stored positions that the rows may look at.
    """

    first: int
    count: int
    cells: Tensor | None
    longest: int


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [slots, S, K, D], the cache's plan deciding what is touched."""

    def __init__(self, owner: "SlotCache") -> None:
        super().__init__()
        self._owner = owner
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        slots, length = self._owner.slots, self._owner.length
        self.keys = _empty(key_states, slots, length)
        self.values = _empty(value_states, slots, length)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, K, T, D] states as planned; return what the rows attend to, [B, K, S, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        keys = _write(self.keys, key_states, self._owner.plan)
        values = _write(self.values, value_states, self._owner.plan)
        return keys, values

    def resize(self, length: int) -> None:
        """Make room for `length` positions, keeping what is stored."""
        if self.keys is not None and self.values is not None:
            self.keys = grow(self.keys, length)
            self.values = grow(self.values, length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.plan.longest, 0

    def get_seq_length(self) -> int:
        return self._owner.plan.longest

    def get_max_length(self) -> int:
        return self._owner.length


class SlotCache(Cache):
    """A transformers cache whose rows may stand at different positions.

    Call `plan_prompts` or `plan_rows`, then run the model with this cache, explicit positions
    and an explicit 4D mask.
    """

    def __init__(self, layers: int, slots: int, length: int = 0) -> None:
        self.slots = slots
        self.length = _rounded(length)
        self.plan = Plan(0, 0, None, 0)
        self._slot_layers = [SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    def reserve(self, length: int) -> None:
        """Grow to hold at least `length` positions a slot."""
        if length > self.length:
            self.length = _rounded(max(length, self.length + self.length // 4))
            for layer in self._slot_layers:
                layer.resize(self.length)

    def plan_prompts(self, first: int, count: int, length: int) -> None:
        """The next pass writes positions 0 .. length-1 of slots first .. first+count-1."""
        self.reserve(length)
        self.plan = Plan(first, count, None, length)

    def plan_rows(self, first: int, positions_BT: Tensor, longest: int) -> None:
        """The next pass writes position positions_BT[b, t] of slot first + b."""
        self.reserve(longest)
        count = positions_BT.shape[0]
        slots_B1 = torch.arange(first, first + count, device=positions_BT.device)[:, None]
        cells = (slots_B1 * self.length + positions_BT).reshape(-1)
        self.plan = Plan(first, count, cells, longest)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot."""
        for layer in self._slot_layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys[target, :length] = layer.keys[source, :length]
                layer.values[target, :length] = layer.values[source, :length]

    def bytes(self) -> int:
        """Memory held by keys and values."""
        tensors = [t for layer in self._slot_layers for t in (layer.keys, layer.values)]
        return sum(t.nbytes for t in tensors if t is not None)


def grow(buffer: Tensor, length: int) -> Tensor:
    """A buffer whose dimension 1 is `length`, old content kept, the rest zero."""
    bigger = buffer.new_zeros(buffer.shape[0], length, *buffer.shape[2:])
    bigger[:, : buffer.shape[1]] = buffer
    return bigger


def _empty(states: Tensor, slots: int, length: int) -> Tensor:
    """Zeros: a masked position still enters the product 0 * value, which NaN would spoil."""
    _, heads, _, size = states.shape
    return states.new_zeros(slots, length, heads, size)


def _write(store: Tensor, states: Tensor, plan: Plan) -> Tensor:
    if plan.cells is None:
        store[plan.first : plan.first + plan.count, : plan.longest] = states.transpose(1, 2)
        return states
    rows = states.transpose(1, 2).reshape(-1, *store.shape[2:])
    store.view(-1, *store.shape[2:]).index_copy_(0, plan.cells, rows)
    return store[plan.first : plan.first + plan.count, : plan.longest].transpose(1, 2)


def _rounded(length: int) -> int:
    return -(-length // _GRAIN) * _GRAIN
