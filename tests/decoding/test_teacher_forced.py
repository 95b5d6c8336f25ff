"""Which rows are drafted from, and that batching them changes nothing."""

from pathlib import Path

import pytest
import torch

from bebop.decoding import teacher_forced
from bebop.decoding.teacher_forced import (
    Text,
    drafted_depths,
    gather_rows,
    measure_positions,
    trained_depths,
)
from bebop.errors import InputError
from bebop.models.backbone import load_backbone
from bebop.models.mtp_head import new_head

MASK = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0]])


def test_masks_stop_at_the_end_of_the_response() -> None:
    valid_GBT = trained_depths(MASK, 2)
    # Depth i of row t needs tokens t+2 .. t+i+1 in the response.
    assert valid_GBT[0].int().tolist() == [[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert valid_GBT[1].int().tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]


def test_drafts_start_after_the_first_sampled_token() -> None:
    valid_GBT = drafted_depths(MASK, 2)
    assert valid_GBT[0].int().tolist() == [[0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert valid_GBT[1].int().tolist() == [[0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]


def test_gathered_rows_point_at_their_targets() -> None:
    rows = gather_rows(trained_depths(MASK, 2))
    assert rows.index_R.tolist() == [0, 1, 2, 6]
    assert rows.target_GR.tolist() == [[1, 2, 3, 7], [2, 3, 4, 8]]
    assert rows.valid_GR.int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    parts = list(rows.chunks(3))
    assert [len(part.index_R) for part in parts] == [3, 1]
    assert torch.cat([part.target_GR for part in parts], dim=1).equal(rows.target_GR)


def test_figures_do_not_depend_on_batches_chunks_or_padding(
    tiny_backbone_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = load_backbone(tiny_backbone_dir)
    head = new_head(backbone)
    texts = [
        Text(tuple(torch.randint(4, 64, (3 + size,)).tolist()), (0,) * 3 + (1,) * size)
        for size in (9, 2, 5, 1, 7)
    ]
    one = measure_positions(backbone, head, texts, 3, temperature=0.8, batch_size=1)
    monkeypatch.setattr(teacher_forced, "chunk_rows", lambda vocabulary: 4)
    many = measure_positions(backbone, head, texts, 3, temperature=0.8, batch_size=5)
    assert one.document.tolist() == many.document.tolist()
    assert one.row.tolist() == many.row.tolist()
    assert one.valid.equal(many.valid)
    for name in ("alpha_rs", "alpha_to", "kl", "step_rs", "entropy_target", "entropy_draft"):
        a, b = (getattr(x, name)[one.valid] for x in (one, many))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_responses_of_one_token_leave_nothing_to_measure(tiny_backbone_dir: Path) -> None:
    backbone = load_backbone(tiny_backbone_dir)
    with pytest.raises(InputError, match="nothing is drafted"):
        measure_positions(
            backbone, new_head(backbone), [Text((5, 6, 7), (0, 0, 1))], 3, temperature=1.0
        )
