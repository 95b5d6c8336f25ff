"""Reading the `dataset` artifact of `data_prep`: prompts, documents, and how to sample."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bebop.errors import ArtifactError, InputError
from bebop.provenance import read_manifest
from bebop.rollout.engine import SamplingParams

PROMPT_COLUMNS = ("prompt_id", "tokens", "text", "task", "gold", "entry")
REMAKE = "The dataset was made for another model: rerun data_prep with this one"


@dataclass(frozen=True)
class Prompt:
    """One row of `prompts/*.parquet`; `entry` is what the task's verifier knows about it."""

    prompt_id: str
    tokens: tuple[int, ...]
    text: str
    task: str
    gold: str
    entry: Mapping[str, Any]


def read_prompts(
    dataset: Path, side: str, vocab_size: int, count: int | None = None
) -> list[Prompt]:
    """Prompts of one side of the split, in the file's order.

    Args:
        dataset: artifact of `data_prep`.
        side: "train" or "eval".
        vocab_size: tokens must lie below it.
        count: at most so many; None reads all.

    Raises:
        ArtifactError: the file is missing, or not such a parquet.
        InputError: it holds no prompt, or one that the model cannot read.
    """
    file = Path(dataset) / "prompts" / f"{side}.parquet"
    rows = read_rows(file, PROMPT_COLUMNS)[:count]
    if not rows:
        raise InputError(
            "there is no prompt", where=str(file), fix="Look into the dataset's rejects.jsonl"
        )
    prompts = [_prompt(row, file) for row in rows]
    for prompt in prompts:
        check_tokens(prompt.tokens, vocab_size, f"prompt {prompt.prompt_id}", file)
    return prompts


def _prompt(row: dict[str, Any], file: Path) -> Prompt:
    try:
        entry = json.loads(row["entry"])
    except json.JSONDecodeError as error:
        raise ArtifactError(
            f"the entry of prompt {row['prompt_id']} is not JSON: {error}",
            where=str(file),
            fix="Rerun data_prep",
        ) from error
    return Prompt(**{**row, "tokens": tuple(row["tokens"]), "entry": entry})


def read_rows(file: Path, columns: Iterable[str]) -> list[dict[str, Any]]:
    """Rows of a parquet file, only the given columns.

    Raises:
        ArtifactError: the file is missing, no parquet, or lacks a column.
    """
    import pyarrow
    import pyarrow.parquet

    names = list(columns)
    if not file.is_file():
        raise ArtifactError("the dataset has no such file", where=str(file), fix="Rerun data_prep")
    try:
        table = pyarrow.parquet.read_table(file, columns=names)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowKeyError) as error:
        raise ArtifactError(
            f"not a parquet file with the columns {', '.join(names)}: {error}",
            where=str(file),
            fix="Rerun data_prep",
        ) from error
    if missing := sorted(set(names) - set(table.column_names)):
        raise ArtifactError(
            f"the columns {', '.join(missing)} are missing", where=str(file), fix="Rerun data_prep"
        )
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def check_tokens(tokens: tuple[int, ...], vocab_size: int, name: str, file: Path) -> None:
    """Refuse an empty sequence and tokens that the model does not have.

    Raises:
        InputError: with the sequence's name.
    """
    if not tokens or not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise InputError(
            f"{name} is empty or has a token outside 0..{vocab_size - 1}",
            where=str(file),
            fix=REMAKE,
        )


def read_sampling(dataset: Path, **changes: Any) -> SamplingParams:
    """How rollouts sample, as the manifest records it.

    Args:
        dataset: artifact of `data_prep`.
        changes: fields of `SamplingParams` to set otherwise; None leaves the recorded value.

    Raises:
        ArtifactError: the manifest does not say it.
    """
    manifest = read_manifest(Path(dataset), "manifest.json")
    try:
        values = manifest["sampling"]
        recorded = SamplingParams(
            temperature=float(values["temperature"]),
            top_k=int(values["top_k"]),
            top_p=float(values["top_p"]),
            max_tokens=int(values["max_tokens"]),
            stop_token_ids=tuple(int(token) for token in manifest["stop_token_ids"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"it does not say how rollouts are sampled: {error!r}",
            where=str(Path(dataset) / "manifest.json"),
            fix="Rerun data_prep",
        ) from error
    return replace(
        recorded, **{name: value for name, value in changes.items() if value is not None}
    )
