"""What every test shares: one torch thread, fixed seeds, and a tiny model that really runs."""

import os
import random
import sys
from pathlib import Path

import pytest

# Before torch is imported: on a shared machine two threads run slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz \n+-*/=?.,:'()!WTHCSIANP"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Same random numbers in every test, whatever ran before it."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_num_threads(1)


def save_tokenizer(folder: Path) -> None:
    """A character tokenizer with 64 entries and a ChatML template."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    assert len(vocabulary) == 64
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)


def save_backbone(folder: Path, *, seed: int = 0) -> None:
    """A random Llama (2 layers, hidden 32, vocabulary 64) that transformers loads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
        # The usual 0.02 gives almost uniform output, which would hide mistakes.
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_backbone_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the tiny backbone and its tokenizer; tests must not write into it."""
    folder = tmp_path_factory.mktemp("tiny") / "backbone"
    save_backbone(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tracking_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real MLflow store (SQLite); making one takes seconds, so tests share it."""
    from bebop.tracking import ensure_experiment, make_client

    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    ensure_experiment(make_client(uri), folder / "artifacts")
    return uri


@pytest.fixture(autouse=True)
def _no_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own MLflow and a surrounding pipeline run stay out of the tests."""
    for name in list(os.environ):
        if name.startswith(("MLFLOW_TRACKING", "MLFLOW_RUN", "MLFLOW_EXPERIMENT", "BEBOP_")):
            monkeypatch.delenv(name)
