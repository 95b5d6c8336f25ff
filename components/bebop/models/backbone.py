"""A causal language model as the rest of bebop sees it: embed, trunk, final norm, lm_head.

Shape suffixes: B rows, T tokens, H hidden, V vocabulary, S cached positions.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache
from transformers.utils import logging

from bebop.errors import InputError

# Finite, so that 0 * logit is 0 in a cross entropy, and low enough that exp() is exactly 0.
PADDED_LOGIT = -1e30

_LOAD_ERRORS = (OSError, ValueError, KeyError, AttributeError, RuntimeError, SafetensorError)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass
class Backbone:
    """A transformers causal LM whose attention layers all see the whole past.

    Attributes:
        model: the LM, in eval mode, its parameters frozen by `load_backbone`.
        tokenizer: None for a folder without tokenizer files.
        path: folder it was loaded from.
        config: the model's own config.
        token_count: rows of the vocabulary that are real tokens; logits of the padded rows
            above are `PADDED_LOGIT`.
    """

    model: Any
    tokenizer: Any = None
    path: Path | None = None
    config: Any = field(init=False)
    token_count: int = field(init=False)

    def __post_init__(self) -> None:
        self.config = self.model.config
        _check_architecture(self.model)
        highest = max(self.tokenizer.get_vocab().values()) + 1 if self.tokenizer else 0
        self.token_count = min(highest or self.vocab_size, self.vocab_size)

    @property
    def trunk(self) -> Any:
        """The model without its lm_head."""
        return self.model.base_model

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the lm_head, padding included."""
        return self.lm_head.weight.shape[0]

    @property
    def embed(self) -> Any:
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> Any:
        return self.model.get_output_embeddings()

    @property
    def layers(self) -> Any:
        return self.trunk.layers

    @property
    def final_norm(self) -> Any:
        return self.trunk.norm

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def rotary(self, hidden_BTH: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine that the decoder layers take as `position_embeddings`."""
        return self.trunk.rotary_emb(hidden_BTH, positions_BT)

    def hidden_states(
        self,
        tokens_BT: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Run the trunk and return its state after the final norm, [B, T, H].

        Args:
            tokens_BT: int64 token ids.
            positions: [B, T] rotary positions; default 0..T-1.
            mask: None (causal), [B, T] with 0 at padding, or [B, 1, T, S] boolean, True where a
                row may look (or additive float).
            cache: keys and values are appended to it; needs `positions` and a 4D mask when rows
                differ in length.
        """
        output = self.trunk(
            input_ids=tokens_BT,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=cache is not None,
        )
        return output.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary: [..., H] -> [..., V]; padded rows get `PADDED_LOGIT`."""
        return self._without_padding(self.lm_head(hidden))

    def frozen_logits(self, hidden: Tensor) -> Tensor:
        """Like `logits`, but gradients reach `hidden` only, never the lm_head."""
        head = self.lm_head
        bias = None if head.bias is None else head.bias.detach()
        return self._without_padding(nn.functional.linear(hidden, head.weight.detach(), bias))

    def _without_padding(self, logits: Tensor) -> Tensor:
        if self.token_count < logits.shape[-1]:
            logits[..., self.token_count :] = PADDED_LOGIT
        return logits


def load_backbone(
    path: Path | str, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Backbone:
    """Load a model folder; parameters come frozen and in eval mode.

    Raises:
        InputError: the folder is missing, incomplete, damaged, or of an architecture that the
            decoder cannot run.
    """
    folder = Path(path)
    _check_folder(folder)
    try:
        with _no_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
        tokenizer = _load_tokenizer(folder)
    except _LOAD_ERRORS as error:
        raise InputError(
            f"the model cannot be loaded: {_first_line(error)}",
            where=str(folder),
            fix="Download or convert it again; the folder may be cut short",
        ) from error
    model, info = loaded
    missing = sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"])
    if missing:
        raise InputError(
            f"the weights lack {len(missing)} tensors, first {missing[0]}",
            where=str(folder),
            fix="Download or convert it again; the folder may be cut short",
        )
    model = model.to(device).eval().requires_grad_(False)
    return Backbone(model, tokenizer, folder)


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _load_tokenizer(folder: Path) -> Any:
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return None


def _check_folder(folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        what = "the model folder has no config.json" if folder.is_dir() else "no such model folder"
        raise InputError(what, where=str(folder), fix="Give a folder that transformers can load")
    try:
        json.loads(config.read_text())
    except ValueError as error:
        raise InputError(
            f"config.json is damaged: {_first_line(error)}",
            where=str(config),
            fix="Download or convert the model again",
        ) from error
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise InputError(
            "the model folder has no weights",
            where=str(folder),
            fix="It needs model.safetensors beside config.json",
        )


def _check_architecture(model: Any) -> None:
    trunk = model.base_model
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    parts = [name for name in ("layers", "norm", "rotary_emb") if not hasattr(trunk, name)]
    attention = model.config._attn_implementation
    if parts or kinds != {"full_attention"} or attention != "sdpa":
        problem = f"no {', '.join(parts)}" if parts else f"{sorted(kinds)} with {attention}"
        raise InputError(
            f"{type(model).__name__} cannot be decoded with a head: {problem}",
            where=str(model.config.name_or_path or type(model).__name__),
            fix="Use a Llama- or Qwen-shaped model with full attention (sdpa) in every layer",
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
