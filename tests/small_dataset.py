"""A dataset artifact whose text a tiny backbone sampled itself, for the tests of the stages."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bebop.models.backbone import Backbone, load_backbone

STOP = 2


def write_dataset(folder: Path, backbone_dir: Path, *, documents: int = 48, seed: int = 0) -> Path:
    """Sample responses of 6 to 14 tokens and write the files that `data_prep` writes."""
    torch.manual_seed(seed)
    backbone = load_backbone(backbone_dir)
    prompts = torch.randint(4, backbone.vocab_size, (documents, 5)).tolist()
    texts = [(prompt, sample_response(backbone, prompt)) for prompt in prompts]
    train, held_out = texts[documents // 3 :], texts[: documents // 3]
    for name, part in (("train", train), ("eval", held_out)):
        write_sft(folder / "sft" / f"{name}.parquet", part)
        write_prompts(folder / "prompts" / f"{name}.parquet", [prompt for prompt, _ in part])
    (folder / "manifest.json").write_text(json.dumps(manifest()))
    return folder


def manifest(**sampling: Any) -> dict[str, Any]:
    """The manifest's fields that other stages read."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 12}
    return {
        "version": 1,
        "template_hash": "sha256:template",
        "sampling": {**defaults, **sampling},
        "stop_token_ids": [STOP],
    }


@torch.no_grad()
def sample_response(backbone: Backbone, prompt: Sequence[int], tokens: int = 12) -> list[int]:
    """Tokens up to and including the stop token."""
    text = list(prompt)
    for _ in range(tokens):
        logits_V = backbone.logits(backbone.hidden_states(torch.tensor([text])))[0, -1]
        text.append(int(torch.multinomial(torch.softmax(logits_V, -1), 1)))
        if text[-1] == STOP:
            break
    return text[len(prompt) :]


def write_sft(file: Path, texts: Sequence[tuple[list[int], list[int]]]) -> None:
    """`sft/*.parquet` from (prompt, response) pairs."""
    import pyarrow
    import pyarrow.parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "tokens": pyarrow.array(
            [prompt + response for prompt, response in texts], pyarrow.list_(pyarrow.int32())
        ),
        "mask": pyarrow.array(
            [[0] * len(prompt) + [1] * len(response) for prompt, response in texts],
            pyarrow.list_(pyarrow.int8()),
        ),
        "prompt_id": [f"p{i}" for i in range(len(texts))],
        "source": ["on_policy"] * len(texts),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), file)


def write_prompts(file: Path, prompts: Sequence[list[int]]) -> None:
    """`prompts/*.parquet` from tokens."""
    import pyarrow
    import pyarrow.parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    count = len(prompts)
    columns = {
        "prompt_id": [f"p{i}" for i in range(count)],
        "tokens": pyarrow.array(prompts, pyarrow.list_(pyarrow.int32())),
        "text": [""] * count,
        "task": ["reasoning_gym:chain_sum"] * count,
        "gold": ["0"] * count,
        "entry": ["{}"] * count,
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
