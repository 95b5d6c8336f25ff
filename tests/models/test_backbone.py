import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.small_models import FAMILIES, small_backbone
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, MistralForCausalLM

from bebop.errors import InputError
from bebop.models.backbone import PADDED_LOGIT, Backbone, load_backbone


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_hidden_states_and_logits_are_those_of_the_model(family: str) -> None:
    backbone = small_backbone(family)
    tokens = torch.randint(0, 11, (3, 7))
    expected = backbone.model(tokens).logits
    torch.testing.assert_close(backbone.logits(backbone.hidden_states(tokens)), expected)


def test_explicit_mask_equals_the_causal_default() -> None:
    backbone = small_backbone()
    tokens = torch.randint(0, 11, (2, 6))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    explicit = backbone.hidden_states(tokens, mask=mask, positions=torch.arange(6)[None])
    torch.testing.assert_close(explicit, backbone.hidden_states(tokens))


def test_a_loaded_folder_is_frozen_and_scores_as_transformers_does(tiny_backbone_dir: Path) -> None:
    backbone = load_backbone(tiny_backbone_dir)
    tokens = torch.randint(0, 64, (2, 5))
    model = AutoModelForCausalLM.from_pretrained(tiny_backbone_dir)
    torch.testing.assert_close(
        backbone.logits(backbone.hidden_states(tokens)), model(tokens).logits
    )
    assert not any(p.requires_grad for p in backbone.model.parameters())
    assert backbone.token_count == backbone.vocab_size == 64


def test_padded_vocabulary_rows_get_no_probability() -> None:
    backbone = small_backbone()
    backbone.token_count = 8
    logits = backbone.logits(torch.randn(4, 16, dtype=torch.float64))
    assert (logits[:, 8:] == PADDED_LOGIT).all()
    assert (logits.softmax(-1)[:, 8:] == 0).all()


def test_frozen_logits_send_no_gradient_to_the_lm_head() -> None:
    backbone = small_backbone()
    backbone.lm_head.weight.requires_grad_(True)
    hidden = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    backbone.frozen_logits(hidden).sum().backward()
    assert hidden.grad is not None
    assert backbone.lm_head.weight.grad is None


def test_bad_folders_end_with_one_clear_message(tiny_backbone_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such model folder"):
        load_backbone(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no config\.json"):
        load_backbone(tmp_path)
    cut = tmp_path / "cut"
    shutil.copytree(tiny_backbone_dir, cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot be loaded"):
        load_backbone(cut)
    weights.unlink()
    with pytest.raises(InputError, match="no weights"):
        load_backbone(cut)
    (cut / "config.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        load_backbone(cut)


def test_missing_tensors_are_not_replaced_by_random_ones(
    tiny_backbone_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "deeper"
    shutil.copytree(tiny_backbone_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="lack"):
        load_backbone(folder)


def test_sliding_attention_is_refused() -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    sizes = {k: getattr(config, k) for k in ("vocab_size", "hidden_size", "intermediate_size")}
    mistral = MistralConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    mistral.layer_types = ["sliding_attention"]
    with pytest.raises(InputError, match="full attention"):
        Backbone(MistralForCausalLM(mistral))
