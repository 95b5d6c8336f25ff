"""The `dataset` artifact: parquet files, rejects and manifest."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop.data_prep.on_policy import Prompt, Response
from bebop.data_prep.rows import Rejects
from bebop.data_prep.split import split_hash
from bebop.provenance import write_json

VERSION = 1
SOURCE = "on_policy"


@dataclass(frozen=True)
class Side:
    """One side of the split: its prompts and the responses sampled for them."""

    prompts: Sequence[Prompt]
    responses: Sequence[Response]


def write_dataset(
    folder: Path, sides: Mapping[str, Side], rejects: Rejects, manifest: Mapping[str, Any]
) -> None:
    """Write everything but the provenance.

    Args:
        folder: an existing folder.
        sides: "train" and "eval".
        rejects: dropped rows.
        manifest: what the stage knows beyond the counts.
    """
    for kind, write in (("prompts", write_prompts), ("sft", write_responses)):
        (folder / kind).mkdir()
        for name, side in sides.items():
            write(folder / kind / f"{name}.parquet", side)
    rejects.write(folder / "rejects.jsonl")
    ids = {n: [p.question.prompt_id for p in side.prompts] for n, side in sides.items()}
    write_json(
        folder / "manifest.json",
        {
            "version": VERSION,
            "counts": counts(sides, rejects),
            "split_hash": split_hash(ids["train"], ids["eval"]),
            **manifest,
        },
    )


def counts(sides: Mapping[str, Side], rejects: Rejects) -> dict[str, Any]:
    """Rows and tokens by side, and rejects by reason."""
    found: dict[str, Any] = {}
    for name, side in sides.items():
        found[f"prompts_{name}"] = len(side.prompts)
        found[f"responses_{name}"] = len(side.responses)
        found[f"response_tokens_{name}"] = sum(len(r.tokens) for r in side.responses)
    return {**found, "rejects": len(rejects.rows), "rejects_by_reason": rejects.counts()}


def write_prompts(file: Path, side: Side) -> None:
    """One row a prompt."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        {
            "prompt_id": pa.string(),
            "tokens": pa.list_(pa.int32()),
            "text": pa.string(),
            "task": pa.string(),
            "gold": pa.string(),
            "entry": pa.string(),
        }
    )
    rows = [
        {
            "prompt_id": prompt.question.prompt_id,
            "tokens": list(prompt.tokens),
            "text": prompt.question.text,
            "task": prompt.question.task,
            "gold": prompt.question.gold,
            "entry": json.dumps(prompt.question.entry),
        }
        for prompt in side.prompts
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), file)


def write_responses(file: Path, side: Side) -> None:
    """One row a response: prompt and response tokens, and 1 where a token is to be learnt."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        {
            "tokens": pa.list_(pa.int32()),
            "mask": pa.list_(pa.int8()),
            "prompt_id": pa.string(),
            "source": pa.string(),
        }
    )
    rows = [
        {
            "tokens": [*r.prompt.tokens, *r.tokens],
            "mask": [0] * len(r.prompt.tokens) + [1] * len(r.tokens),
            "prompt_id": r.prompt.question.prompt_id,
            "source": SOURCE,
        }
        for r in side.responses
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), file)
