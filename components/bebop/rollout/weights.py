"""Replacing a running model's weights: checked whole before the first copy."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bebop.errors import InputError
from bebop.models.backbone import Backbone
from bebop.models.checkpoint import PREFIX
from bebop.models.mtp_head import MTPHead


def target_tensors(backbone: Backbone) -> dict[str, Tensor]:
    """The backbone's parameters by name; a tied lm_head is there under both names."""
    return dict(backbone.model.named_parameters(remove_duplicate=False))


def draft_tensors(head: MTPHead | None) -> dict[str, Tensor]:
    """The head's parameters under their names on disk.

    Raises:
        InputError: there is no head.
    """
    if head is None:
        raise InputError(
            "there is no head to write to", where="load_weights", fix='Use selector "target"'
        )
    return {PREFIX + name: parameter for name, parameter in head.named_parameters()}


def check_tensors(
    tensors: Mapping[str, Tensor], writable: Mapping[str, Tensor], selector: str
) -> None:
    """Check names, shapes and values against what may be written.

    Raises:
        InputError: naming the first tensors that do not fit.
    """
    unknown = sorted(tensors.keys() - writable.keys())
    shapes = [n for n, t in tensors.items() if n in writable and t.shape != writable[n].shape]
    values = [name for name, t in tensors.items() if not bool(t.isfinite().all())]
    problems = {"unknown": unknown, "of another shape": shapes, "not finite": values}
    found = [f"{len(names)} {kind}, e.g. {names[0]}" for kind, names in problems.items() if names]
    if not tensors:
        found = ["no tensor was given"]
    if found:
        raise InputError(
            f"weights refused: {'; '.join(found)}",
            where=f"load_weights, selector {selector!r}",
            fix='Send the names of the side that is selected ("mtp.…" is the draft)',
        )


@torch.no_grad()
def copy_tensors(tensors: Mapping[str, Tensor], writable: Mapping[str, Tensor]) -> None:
    """Copy checked tensors in place, converting type and device."""
    for name, tensor in tensors.items():
        writable[name].copy_(tensor)
