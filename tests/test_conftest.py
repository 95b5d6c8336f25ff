"""The shared tiny model is a real one: it loads, its template applies, its output is not flat."""

from bebop.decoding.acceptance import entropy
from bebop.models.backbone import load_backbone


def test_tiny_backbone_loads_and_is_peaked_but_not_greedy(tiny_backbone_dir):
    backbone = load_backbone(tiny_backbone_dir)
    ids = backbone.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 3 + 4?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    probs = backbone.logits(backbone.hidden_states(ids)).softmax(-1)
    assert 1.0 < entropy(probs).mean() < 3.9


def test_tokenizer_round_trips_text(tiny_backbone_dir):
    tokenizer = load_backbone(tiny_backbone_dir).tokenizer
    text = "<|im_start|>user\nWhat is 12 + (-3)?<|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == 1
    assert tokenizer.eos_token_id == 2
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.model_input_names == ["input_ids", "attention_mask"]
