"""The stage as its users call it, and the decision it takes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.small_dataset import manifest, write_prompts

from bebop.decoding import loop
from bebop.diagnosis.stage import Config, run
from bebop.diagnosis.study import backbone_warnings
from bebop.diagnosis.verdict import Option, decide
from bebop.errors import ArtifactError, InputError, LosslessnessError
from bebop.metrics import unknown_metrics
from bebop.models.checkpoint import backbone_hash, load_model
from bebop_kernels.rejection import verify_chain

QUICK = {"prompts": 8, "losslessness_draws": 500, "rollout_batch": 4, "batch_sizes": [1]}
QUICK |= {"bootstrap": 200, "cost_repeats": 1, "threads": 1}


def diagnose(dataset: Path, model: Path, out: Path, **values: object) -> dict[str, float]:
    return run(
        Config.from_values({**QUICK, **values}),
        dataset=dataset,
        model=model,
        diagnosis=out / "diagnosis",
        report=out / "report.html",
    )


def test_the_artifact_holds_what_later_stages_read(
    dataset: Path, model: Path, tmp_path: Path
) -> None:
    metrics = diagnose(dataset, model, tmp_path)
    assert unknown_metrics(list(metrics)) == []
    record = json.loads((tmp_path / "diagnosis" / "diagnosis.json").read_text())
    assert record["version"] == 1
    assert record["verdict"] in ("rejection", "target_only", "off")
    assert 1 <= record["gamma"] <= 3
    assert (record["max_batch"] == 0) == (record["verdict"] == "off")
    assert [entry["depth"] for entry in record["alpha_rs"]] == [1, 2, 3]
    for entry in (*record["alpha_rs"], *record["alpha_to"]):
        assert 0 <= entry["low"] <= entry["mean"] <= entry["high"] <= 1
    assert metrics["accept/alpha_1"] == record["alpha_rs"][0]["mean"]
    assert record["entropy"]["level"] == "position"
    assert record["entropy"]["low"] < record["entropy"]["mean"] < record["entropy"]["high"]
    assert record["losslessness"]["passed"] is True
    assert record["temperature"] == 1.0
    assert [costs["batch"] for costs in record["costs"]] == [1, 4]
    assert record["warnings"] == []
    assert (tmp_path / "diagnosis" / "provenance.json").is_file()
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3
    assert page.index(record["reason"][:20]) < page.index("<h2>")


def test_fixed_seeds_give_the_same_acceptance(dataset: Path, model: Path, tmp_path: Path) -> None:
    values = {"prompts": 4, "samples": 1}
    a = diagnose(dataset, model, tmp_path / "a", **values)
    b = diagnose(dataset, model, tmp_path / "b", **values)
    c = diagnose(dataset, model, tmp_path / "c", seed=1, **values)
    timed = {"speedup/predicted"}
    assert {k: v for k, v in a.items() if k not in timed} == {
        k: v for k, v in b.items() if k not in timed
    }
    assert a["accept/alpha_1"] != c["accept/alpha_1"]


def test_a_wrong_verifier_fails_the_stage_and_leaves_nothing(
    dataset: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flat_draft(d, q, p, u, **options):  # type: ignore[no-untyped-def]
        return verify_chain(d, q * 0 + 1 / q.shape[-1], p, u)

    monkeypatch.setattr(loop, "verify_chain", flat_draft)
    with pytest.raises(LosslessnessError):
        diagnose(dataset, model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_mismatches_with_the_training_are_named(dataset: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dataset"
    shutil.copytree(dataset, folder)
    changed = {**manifest(temperature=0.8), "template_hash": "sha256:other"}
    (folder / "manifest.json").write_text(json.dumps(changed))
    diagnose(folder, model, tmp_path, prompts=3, samples=1)
    warnings = json.loads((tmp_path / "diagnosis" / "diagnosis.json").read_text())["warnings"]
    assert "another chat template" in warnings[0]
    assert "temperature 1, rollouts use 0.8" in warnings[1]
    assert "another chat template" in (tmp_path / "report.html").read_text()


def test_a_dataset_without_prompts_is_refused(dataset: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dataset"
    shutil.copytree(dataset, folder)
    write_prompts(folder / "prompts" / "eval.parquet", [])
    with pytest.raises(InputError, match="no prompt"):
        diagnose(folder, model, tmp_path)
    write_prompts(folder / "prompts" / "eval.parquet", [[5, 64]])
    with pytest.raises(InputError, match=r"outside 0\.\.63"):
        diagnose(folder, model, tmp_path)
    shutil.rmtree(folder / "prompts")
    with pytest.raises(ArtifactError, match="no such file"):
        diagnose(folder, model, tmp_path)


def options(speedups: dict[tuple[str, int, int], float]) -> list[Option]:
    return [
        Option(mode, gamma, batch, 0.5, value)  # type: ignore[arg-type]
        for (mode, gamma, batch), value in speedups.items()
    ]


def test_the_fastest_setting_at_the_rollout_batch_wins() -> None:
    verdict = decide(
        options(
            {
                ("rejection", 2, 1): 1.9,
                ("rejection", 3, 1): 2.5,
                ("rejection", 2, 32): 1.3,
                ("rejection", 3, 32): 1.2,
                ("target_only", 2, 32): 1.1,
            }
        ),
        32,
        margin=1.02,
    )
    assert (verdict.verdict, verdict.gamma, verdict.max_batch) == ("rejection", 2, 32)


def test_speculation_that_pays_only_in_the_tail_is_limited_to_it() -> None:
    verdict = decide(
        options(
            {
                ("target_only", 1, 1): 1.4,
                ("target_only", 1, 4): 1.2,
                ("rejection", 1, 1): 1.5,
                ("rejection", 1, 4): 1.0,
                ("rejection", 1, 32): 0.7,
                ("target_only", 1, 32): 0.8,
            }
        ),
        32,
        margin=1.02,
    )
    assert (verdict.verdict, verdict.gamma, verdict.max_batch) == ("target_only", 1, 4)
    assert "up to 4 active requests" in verdict.reason


def test_a_large_gain_in_small_batches_beats_a_small_one_in_larger() -> None:
    verdict = decide(
        options(
            {
                ("rejection", 1, 1): 1.3,
                ("rejection", 1, 4): 1.05,
                ("rejection", 1, 32): 0.8,
                ("rejection", 3, 1): 1.9,
                ("rejection", 3, 4): 0.99,
                ("rejection", 3, 32): 0.6,
            }
        ),
        32,
        margin=1.02,
    )
    assert (verdict.gamma, verdict.max_batch) == (3, 1)


def test_speculation_that_never_pays_is_off() -> None:
    verdict = decide(
        options({("rejection", 1, 1): 1.01, ("rejection", 1, 32): 0.7}), 32, margin=1.02
    )
    assert (verdict.verdict, verdict.max_batch) == ("off", 0)
    assert "No setting pays" in verdict.reason


def test_a_head_on_other_weights_than_its_own_is_warned_about(model: Path) -> None:
    backbone, _, meta = load_model(model)
    meta = meta.model_copy(update={"backbone_hash": backbone_hash(backbone)})
    assert backbone_warnings(meta, backbone) == []
    with torch.no_grad():
        next(backbone.model.parameters()).add_(0.1)
    assert "other backbone weights" in backbone_warnings(meta, backbone)[0]
