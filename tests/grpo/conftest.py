"""Inputs of the stage: a tiny model with a head, real chain_sum prompts, a diagnosis."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

PROMPTS = 10


def write_model(folder: Path, backbone_dir: Path) -> Path:
    """Backbone and a new head."""
    from bebop.models.backbone import load_backbone
    from bebop.models.checkpoint import HeadMeta, save_model
    from bebop.models.mtp_head import new_head

    backbone = load_backbone(backbone_dir)
    save_model(folder, backbone, new_head(backbone), HeadMeta(), unchanged=backbone_dir)
    return folder


def write_prompts(file: Path, tokenizer_dir: Path, seed: int) -> None:
    """Sums of two one-digit numbers whose result is one digit, which random text hits at times."""
    import pyarrow
    import pyarrow.parquet
    import reasoning_gym
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    source = reasoning_gym.create_dataset(
        "chain_sum", size=200, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    entries = [entry for entry in source if len(entry["answer"]) == 1][:PROMPTS]
    rows = [
        {
            "prompt_id": f"p{number}",
            "tokens": tokenizer(entry["question"][-8:].lower())["input_ids"],
            "text": entry["question"],
            "task": "reasoning_gym:chain_sum",
            "gold": entry["answer"],
            "entry": json.dumps(entry),
        }
        for number, entry in enumerate(entries)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def write_diagnosis(folder: Path, mode: str = "rejection", gamma: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    record = {"version": 1, "verdict": mode, "gamma": gamma, "max_batch": 0}
    (folder / "diagnosis.json").write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_backbone_dir: Path) -> dict[str, Path]:
    """`dataset`, `model`, `diagnosis`; tests must not write into them."""
    folder = tmp_path_factory.mktemp("grpo-inputs")
    dataset = folder / "dataset"
    for seed, split in enumerate(("train", "eval"), start=1):
        write_prompts(dataset / "prompts" / f"{split}.parquet", tiny_backbone_dir, seed)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 6}
    manifest = {"version": 1, "sampling": sampling, "stop_token_ids": [2]}
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    return {
        "dataset": dataset,
        "model": write_model(folder / "model", tiny_backbone_dir),
        "diagnosis": write_diagnosis(folder / "diagnosis"),
    }


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray of this test session; the stage finds it and leaves it running."""
    from bebop.rollout.actors import SMALLEST_OBJECT_STORE, ray_session

    with ray_session("", 3, SMALLEST_OBJECT_STORE):
        yield
