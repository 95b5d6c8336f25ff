"""The whole stage on tiny models: what it writes, and that it writes all or nothing."""

import json
import math
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bebop.config import StageConfig
from bebop.data_prep.stage import Config, run
from bebop.errors import ConfigError, InputError
from bebop.metrics import unknown_metrics
from bebop.models.backbone import load_backbone
from bebop.provenance import hash_path, read_manifest

SCRATCH = {
    "model": "scratch",
    "num_prompts": 30,
    "eval_share": 0.2,
    "max_tokens": 8,
    "scratch_hidden": 32,
    "scratch_layers": 1,
    "scratch_steps": 3,
    "scratch_batch": 4,
    "scratch_vocabulary": 300,
}


def prepare(folder: Path, **values: object) -> dict[str, float]:
    return run(
        Config.from_values(SCRATCH | values),
        dataset=folder / "dataset",
        backbone=folder / "backbone",
        report=folder / "report.html",
    )


def rows(folder: Path, name: str) -> list[dict]:
    return pq.read_table(folder / "dataset" / f"{name}.parquet").to_pylist()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("prepared")
    return folder, prepare(folder)


def test_metrics_are_defined_and_agree_with_the_manifest(prepared) -> None:
    folder, metrics = prepared
    assert unknown_metrics(list(metrics)) == []
    manifest = read_manifest(folder / "dataset", "manifest.json")
    assert manifest["counts"]["prompts_train"] == metrics["data/prompts_train"] == 24
    assert manifest["counts"]["responses_eval"] == metrics["data/responses_eval"] == 12
    assert manifest["entropy"]["mean"] == metrics["entropy/target"]
    assert manifest["entropy"]["min"] <= manifest["entropy"]["p05"] <= manifest["entropy"]["p95"]
    assert manifest["sampling"] == {"temperature": 1, "top_p": 1, "top_k": 0, "max_tokens": 8}
    assert manifest["stop_token_ids"] == [2]


def test_an_untrained_model_has_the_entropy_of_the_uniform_distribution(prepared) -> None:
    folder, metrics = prepared
    vocabulary = load_backbone(folder / "backbone").vocab_size
    assert metrics["entropy/target"] == pytest.approx(math.log(vocabulary), rel=0.15)


def test_masks_decode_back_to_the_response_and_its_end(prepared) -> None:
    folder, _ = prepared
    tokenizer = load_backbone(folder / "backbone").tokenizer
    prompts = {row["prompt_id"]: row["tokens"] for row in rows(folder, "prompts/train")}
    for row in rows(folder, "sft/train"):
        prompt = prompts[row["prompt_id"]]
        assert len(row["tokens"]) == len(row["mask"])
        assert row["tokens"][: len(prompt)] == prompt
        assert row["mask"] == [0] * len(prompt) + [1] * (len(row["tokens"]) - len(prompt))
        response = row["tokens"][len(prompt) :]
        assert 1 <= len(response) <= 8
        assert response[-1] == tokenizer.eos_token_id or len(response) == 8
        assert tokenizer.eos_token_id not in response[:-1]


def test_no_question_is_on_both_sides(prepared) -> None:
    folder, _ = prepared
    sides = [{row["prompt_id"] for row in rows(folder, f"prompts/{n}")} for n in ("train", "eval")]
    assert not sides[0] & sides[1]
    for side, name in zip(sides, ("train", "eval"), strict=True):
        assert {row["prompt_id"] for row in rows(folder, f"sft/{name}")} == side


def test_prompts_carry_what_their_verifier_needs(prepared) -> None:
    from bebop.rewards.registry import self_test

    folder, _ = prepared
    self_test(rows(folder, "prompts/train"))
    assert all(row["text"] in row["entry"] for row in rows(folder, "prompts/eval"))


def test_report_and_provenance(prepared) -> None:
    folder, _ = prepared
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 2
    assert not re.search(r"(src|href)=.(?!#)", page), "the Kubeflow UI loads nothing else"
    record = json.loads((folder / "dataset" / "provenance.json").read_text())
    assert record["config"]["num_prompts"] == 30


def test_the_seed_decides_everything(prepared, tmp_path: Path) -> None:
    folder, metrics = prepared
    # Another batch size changes the rounding of matrix products, and nothing else.
    assert prepare(tmp_path, max_batch=5) == pytest.approx(metrics, rel=1e-5)
    assert hash_path(tmp_path / "backbone") == hash_path(folder / "backbone")
    assert rows(tmp_path, "sft/train") == rows(folder, "sft/train")
    assert prepare(tmp_path, seed=1)["entropy/target"] != metrics["entropy/target"]


def test_a_model_folder_and_a_file_of_questions(tmp_path: Path, tiny_backbone_dir: Path) -> None:
    file = tmp_path / "questions.jsonl"
    good = [json.dumps({"question": f"{n} + 1?", "answer": f"so\n#### {n + 1}"}) for n in range(9)]
    file.write_text("\n".join([*good, '{"question": "no answer"}', good[0]]))
    metrics = prepare(
        tmp_path, model=str(tiny_backbone_dir), task=str(file), max_reject_share=0.2, num_prompts=5
    )
    assert metrics["data/rows_read"] == 11
    assert metrics["data/rejects"] == 2
    assert metrics["data/prompts_train"] + metrics["data/prompts_eval"] == 5
    rejects = (tmp_path / "dataset" / "rejects.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in rejects] == [10, 11]
    assert (tmp_path / "backbone" / "config.json").stat().st_size
    prompt = rows(tmp_path, "prompts/train")[0]
    assert prompt["task"] == "gsm8k"
    assert prompt["text"].startswith(str(int(prompt["gold"]) - 1))


def test_only_some_prompts_are_sampled_when_asked(tmp_path: Path, tiny_backbone_dir: Path) -> None:
    metrics = prepare(
        tmp_path, model=str(tiny_backbone_dir), sample_prompts=10, samples_per_prompt=3
    )
    assert metrics["data/responses_train"] == 8 * 3
    assert metrics["data/responses_eval"] == 2 * 3
    assert metrics["data/prompts_train"] == 24


def test_prompts_that_are_too_long_are_dropped(tmp_path: Path, tiny_backbone_dir: Path) -> None:
    with pytest.raises(InputError, match="longer than 3 tokens"):
        prepare(tmp_path, model=str(tiny_backbone_dir), max_prompt_tokens=3)
    assert not (tmp_path / "dataset").exists()
    with pytest.raises(InputError, match="no prompt is left"):
        prepare(tmp_path, model=str(tiny_backbone_dir), max_prompt_tokens=3, max_reject_share=1)


def test_a_folder_of_links_as_the_hub_cache_keeps_it(
    tmp_path: Path, tiny_backbone_dir: Path
) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    for file in tiny_backbone_dir.iterdir():
        blob = tmp_path / "blobs" / file.name
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    prepare(tmp_path, model=str(snapshot))
    assert not [file for file in (tmp_path / "backbone").iterdir() if file.is_symlink()]
    assert load_backbone(tmp_path / "backbone").vocab_size == 64


def test_a_failure_leaves_no_half_artifact(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        prepare(tmp_path, model=str(tmp_path / "missing"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt_template": "no place"}, "prompt_template.*question"),
        ({"eval_share": 1.0}, "eval_share"),
        ({"num_prompt": 3}, "num_prompt: unknown key"),
        ({"scratch_hidden": 33}, "scratch_hidden"),
    ],
)
def test_wrong_values_are_config_errors(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_values(values)


def test_config_survives_as_text() -> None:
    config = Config.from_values({"task_args": {"min_terms": 2}})
    assert Config.from_text(config.to_text()) == config
    assert isinstance(config, StageConfig)


def test_the_readme_names_every_key_with_its_default() -> None:
    import bebop.data_prep

    readme = (Path(bebop.data_prep.__file__).parent / "README.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", readme, re.MULTILINE))
    values = json.loads(Config().to_text())
    assert table == {key: json.dumps(value) for key, value in values.items()}
