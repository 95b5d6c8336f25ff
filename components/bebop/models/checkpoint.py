"""A model folder with its head: what transformers loads, plus `mtp.safetensors` and `head.json`.

The head's tensors lie in a file of their own, under the Qwen3-Next names: transformers drops
`mtp.*` on load and on save, so they are written and read here, strictly.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bebop.errors import ArtifactError
from bebop.models.backbone import Backbone, load_backbone
from bebop.models.mtp_head import MTPHead
from bebop.provenance import link_or_copy_tree, read_manifest, write_json

HEAD_WEIGHTS = "mtp.safetensors"
HEAD_META = "head.json"
PREFIX = "mtp."


class HeadMeta(BaseModel):
    """How a head was trained and what it fits; `save_model` fills what it can see itself."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    family: Literal["bebop-mtp"] = "bebop-mtp"
    loss: str = Field("", description="Loss it was trained with; empty for a closed-form start.")
    depths: int = Field(3, ge=1, description="Depths it was trained for.")
    temperature: float = Field(1.0, description="Temperature of p and q in training.")
    top_p: float = Field(1.0, description="Top-p of p and q in training.")
    token_count: int = Field(0, ge=0, description="Tokens it was trained on.")
    metrics: dict[str, float] = Field(default_factory=dict, description="Held-out metrics.")
    backbone_hash: str = Field("", description="`hash_tensors` of the backbone it was trained on.")
    template_hash: str = Field("", description="Hash of the chat template of its training text.")
    hidden_size: int = Field(0, description="Hidden size it fits; set on save.")
    vocab_size: int = Field(0, description="Vocabulary rows it fits; set on save.")
    head_hash: str = Field("", description="`hash_tensors` of the head; set on save.")


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, independent of the mapping's order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def backbone_hash(backbone: Backbone) -> str:
    """Hash of the backbone's weights as they are in memory."""
    return hash_tensors(dict(backbone.model.named_parameters()))


def save_model(
    folder: Path,
    backbone: Backbone,
    head: MTPHead,
    meta: HeadMeta,
    *,
    unchanged: Path | None = None,
) -> None:
    """Write backbone, tokenizer and head into `folder` (give the folder of an `atomic_dir`).

    Args:
        unchanged: model folder that holds this very backbone; its files are linked, which saves
            time and disk when only the head was trained.

    Raises:
        ArtifactError: the head holds NaN or infinity.
    """
    tensors = head_tensors(head)
    _check_finite(tensors, str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    if unchanged is not None:
        link_or_copy_tree(unchanged, folder)
        for name in (HEAD_WEIGHTS, HEAD_META, "provenance.json"):
            (folder / name).unlink(missing_ok=True)
    else:
        backbone.model.save_pretrained(folder)
        if backbone.tokenizer is not None:
            backbone.tokenizer.save_pretrained(folder)
    save_file(tensors, folder / HEAD_WEIGHTS)
    (folder / HEAD_WEIGHTS).chmod(0o644)
    filled = meta.model_copy(
        update={
            "hidden_size": backbone.hidden_size,
            "vocab_size": backbone.vocab_size,
            "head_hash": hash_tensors(tensors),
        }
    )
    write_json(folder / HEAD_META, json.loads(filled.model_dump_json()))


def load_model(
    path: Path | str, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Backbone, MTPHead, HeadMeta]:
    """Load a folder that `save_model` wrote; backbone and head come frozen and in eval mode.

    Raises:
        InputError: the backbone cannot be loaded.
        ArtifactError: the head is missing, damaged, incomplete, or made for another backbone.
    """
    folder = Path(path)
    meta = read_head_meta(folder)
    backbone = load_backbone(folder, dtype=dtype, device=device)
    _check_fit(meta, backbone, folder)
    tensors = _read_tensors(folder)
    if hash_tensors(tensors) != meta.head_hash:
        raise _damaged("the head's tensors are not those head.json was written for", folder)
    head = MTPHead(backbone)
    load_head_tensors(head, tensors, where=str(folder / HEAD_WEIGHTS))
    return backbone, head.eval().requires_grad_(False), meta


def read_head_meta(folder: Path) -> HeadMeta:
    """`head.json` alone, without loading a tensor."""
    record = read_manifest(folder, HEAD_META)
    try:
        return HeadMeta(**record)
    except ValidationError as error:
        raise _damaged(f"head.json: {error.errors()[0]['msg']}", folder) from error


def head_tensors(head: MTPHead) -> dict[str, Tensor]:
    """The head's tensors under their names on disk."""
    return {PREFIX + name: t.detach().contiguous() for name, t in head.state_dict().items()}


def load_head_tensors(head: MTPHead, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Copy `tensors` into the head; the key sets and shapes must be equal.

    Raises:
        ArtifactError: keys missing, unknown or of another shape, or values not finite.
    """
    expected = head_tensors(head)
    missing, unknown = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    shapes = [n for n in expected.keys() & tensors.keys() if expected[n].shape != tensors[n].shape]
    if missing or unknown or shapes:
        raise ArtifactError(
            f"the head's tensors do not fit: missing {sorted(missing)[:3]}, unknown "
            f"{sorted(unknown)[:3]}, other shape {sorted(shapes)[:3]}",
            where=where,
            fix="Train a head for this backbone with mtp_sft",
        )
    _check_finite(tensors, where)
    # NaN as sentinel: a tensor that the copy below does not reach cannot pass for trained.
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(math.nan)
    head.load_state_dict({name.removeprefix(PREFIX): t for name, t in tensors.items()}, strict=True)
    assert all(bool(p.isfinite().all()) for p in head.parameters())


def check_head(head: MTPHead, where: str) -> None:
    """Refuse a head whose weights cannot draft.

    Raises:
        ArtifactError: NaN, infinity, or an fc of zeros.
    """
    _check_finite(head_tensors(head), where)


def _check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    bad = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if bad:
        raise ArtifactError(
            f"{len(bad)} tensors of the head hold NaN or infinity, first {sorted(bad)[0]}",
            where=where,
            fix="Train the head again with a lower learning rate",
        )
    if not bool(tensors[PREFIX + "fc.weight"].any()):
        raise ArtifactError(
            "the head's fc is all zeros: it would draft nothing",
            where=where,
            fix="The head was zeroed on its way here; use the folder that mtp_sft wrote",
        )


def _check_fit(meta: HeadMeta, backbone: Backbone, folder: Path) -> None:
    head_sizes = (meta.hidden_size, meta.vocab_size)
    sizes = (backbone.hidden_size, backbone.vocab_size)
    if head_sizes != sizes:
        raise ArtifactError(
            f"the head is made for (hidden, vocabulary) {head_sizes}, the backbone has {sizes}",
            where=str(folder),
            fix="Train a head for this backbone with mtp_sft",
        )


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / HEAD_WEIGHTS
    if not file.is_file():
        raise ArtifactError(
            f"the model has no {HEAD_WEIGHTS}", where=str(folder), fix="Train a head with mtp_sft"
        )
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise _damaged(f"{HEAD_WEIGHTS}: {error}", folder) from error


def _damaged(what: str, folder: Path) -> ArtifactError:
    return ArtifactError(
        f"damaged head: {what}", where=str(folder), fix="Rerun the stage that writes it"
    )
