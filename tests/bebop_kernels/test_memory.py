"""The linear form holds nothing of size T x V: not while it runs, not between the passes."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bebop_kernels import tv_loss as losses

DEPTHS, ROWS, VOCAB, HIDDEN, CHUNK = 3, 128, 8000, 16, 4
SCRATCH = 2 * 2**17 * 4  # bytes of the cache-sized block


class LiveStorage(TorchDispatchMode):
    """Bytes of every storage made inside the block, how many live at once, and the largest."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._inputs = {x.untyped_storage().data_ptr() for x in inputs}
        self._seen: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or key in self._inputs or key in self._seen:
            return
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        self._seen[key] = weakref.ref(storage, lambda _: self._release(key, size))

    def _release(self, key: int, size: int) -> None:
        del self._seen[key]
        self.live -= size


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draft = torch.randn(DEPTHS, ROWS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN)
    return draft, torch.randn(ROWS + DEPTHS, HIDDEN), weight, torch.ones(DEPTHS, ROWS)


def measure(name: str, **options) -> tuple[LiveStorage, int]:
    """What forward and backward hold, and the bytes that live between the two."""
    tensors = problem()
    with LiveStorage(*tensors) as seen:
        loss, _ = getattr(losses, f"linear_{name}_loss")(*tensors, **options)
        gc.collect()
        between = seen.live
        loss.backward()
    return seen, between


ROW_BYTES = VOCAB * 4


def test_the_meter_sees_what_eager_holds() -> None:
    seen, between = measure("e2e_tv", impl="reference")
    assert seen.largest >= ROWS * ROW_BYTES
    assert between >= DEPTHS * ROWS * ROW_BYTES
    assert seen.peak > between


@pytest.mark.parametrize("name", ["e2e_tv", "tv", "kl", "rkl", "ce"])
def test_no_buffer_of_rows_times_vocabulary(name: str) -> None:
    seen, between = measure(name, impl="chunked", chunk=CHUNK)
    buffers = (DEPTHS * CHUNK + CHUNK + DEPTHS - 1) * ROW_BYTES
    assert seen.largest <= max(DEPTHS * CHUNK * ROW_BYTES, SCRATCH) < ROWS * ROW_BYTES / 2
    # The two logits buffers, the cache-sized scratch, and [G, T, H]-sized results.
    assert seen.peak <= buffers + 3 * SCRATCH
    assert between < 2 * DEPTHS * ROWS * HIDDEN * 4


def test_default_chunk_is_a_small_part_of_eager() -> None:
    """At a vocabulary that fills the budget with few rows: at most 5 % of eager's peak."""
    draft = torch.randn(DEPTHS, 128, 4, requires_grad=True)
    tensors = (draft, torch.randn(131, 4), torch.randn(151_936, 4), torch.ones(DEPTHS, 128))
    with LiveStorage(*tensors) as seen:
        losses.linear_e2e_tv_loss(*tensors)[0].backward()
    whole = DEPTHS * 512 * 151_936 * 4  # one [G, T, V] at T = 512; eager holds several
    assert seen.peak <= 0.1 * whole


@pytest.mark.parametrize("impl", ["chunked"])
def test_saved_tensors_are_small(impl: str) -> None:
    saved: list[int] = []
    draft, target, weight, mask = problem()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.untyped_storage().nbytes()) or x, lambda x: x
    ):
        losses.linear_e2e_tv_loss(draft, target, weight, mask, impl=impl, chunk=CHUNK)
    assert saved
    assert sum(saved) <= 2 * DEPTHS * ROWS * (HIDDEN + 1) * 4


def test_logits_form_saves_its_inputs_alone() -> None:
    draft, target = torch.randn(2, 8, VOCAB, requires_grad=True), torch.randn(2, 8, VOCAB)
    with LiveStorage(draft, target) as seen:
        loss, _ = losses.e2e_tv_loss(draft, target, torch.ones(2, 8), impl="chunked")
        gc.collect()
        assert seen.live < ROW_BYTES
        loss.backward()
    # The gradient itself and one block's working copies.
    assert seen.peak < 2 * 8 * ROW_BYTES + 7 * 8 * ROW_BYTES


def test_uninitialised_memory_is_poisoned_here() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.ones(3).new_empty(2, 3).isnan().all()
