"""The stage as a whole, on a real tiny policy."""

import json
import math
from pathlib import Path

import pytest

from bebop.errors import ArtifactError, BebopError
from bebop.metrics import unknown_metrics
from bebop.provenance import hash_path, read_manifest
from bebop.stage_cli import main
from bebop.throughput import stage
from bebop.throughput.bench import PLAIN, Setting
from bebop.throughput.hardware import cpu_name
from bebop.throughput.stage import Config, run
from bebop.throughput.study import list_settings
from bebop.throughput.verdict import Advice

CONFIG = Config(
    gammas=(1, 3),
    batch_sizes=(1, 3),
    repeats=2,
    prompts=4,
    requests=2,
    max_tokens=6,
    cost_seconds=0.0,
    threads=1,
)


@pytest.fixture(scope="module")
def made(tiny_dataset, tiny_policy, tmp_path_factory):
    """One run: folder with both outputs, the returned metrics, the parsed record."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "diagnosis").mkdir()
    advice = {"version": 1, "verdict": "rejection", "gamma": 2, "max_batch": 1}
    (folder / "diagnosis" / "diagnosis.json").write_text(json.dumps(advice))
    metrics = run(
        CONFIG,
        dataset=tiny_dataset,
        policy=tiny_policy,
        diagnosis=folder / "diagnosis",
        throughput=folder / "throughput",
        report=folder / "report.html",
    )
    return folder, metrics, read_manifest(folder / "throughput", "throughput.json")


def cells(record):
    return {(c["mode"], c["gamma"], c["batch"]): c for c in record["cells"]}


def test_every_setting_is_measured_at_every_batch_size(made):
    settings = [
        ("off", 0),
        ("target_only", 1),
        ("target_only", 3),
        ("rejection", 1),
        ("rejection", 2),
        ("rejection", 3),
    ]
    expected = {(mode, gamma, batch) for mode, gamma in settings for batch in (1, 3)}
    assert set(cells(made[2])) == expected


def test_record_is_consistent_in_itself(made):
    record = made[2]
    costs = {(c["mode"], c["batch"]): c for c in record["costs"]}
    for (mode, gamma, batch), cell in cells(record).items():
        assert cell["tokens_per_second"]["p20"] <= cell["tokens_per_second"]["median"]
        assert len(cell["alpha"]) == len(cell["cumulative"]) == gamma
        assert cell["accept_length"] == pytest.approx(1 + sum(cell["cumulative"]))
        assert 0 < cell["mean_active"] <= batch
        if mode == "off":
            assert cell["speedup"] == {"median": 1.0, "p20": 1.0, "p80": 1.0}
            continue
        own = costs[mode, batch]
        (cost,) = [c for c in own["rounds"] if c["gamma"] == gamma]
        total = cost["verify"] + gamma * cost["draft"] + cost["sampler"]
        assert cell["break_even"] == pytest.approx(total / own["decode"] - 1)
        assert cell["predicted_speedup"] == pytest.approx(
            cell["accept_length"] * own["decode"] / total
        )


def test_record_names_machine_and_workload(made):
    record = made[2]
    assert record["hardware"]["threads"] == 1
    assert record["hardware"]["name"]
    workload = record["workload"]
    assert workload["requests"] == {"1": 2, "3": 3}
    assert workload["sampling"]["max_tokens"] == 6
    assert workload["ends"] == "at a stop token or max_tokens"


def test_verdict_follows_from_the_cells(made):
    record = made[2]
    for choice in record["verdict"]["by_batch"]:
        own = [c for c in record["cells"] if c["batch"] == choice["batch"] and c["gamma"]]
        fastest = max(own, key=lambda c: c["speedup"]["median"])
        assert choice["fastest"]["speedup"] == fastest["speedup"]
        assert choice["pays"] == (fastest["speedup"]["median"] >= CONFIG.margin)


def test_metrics_are_defined_finite_and_those_of_the_record(made):
    _, metrics, record = made
    assert unknown_metrics(list(metrics)) == []
    assert all(math.isfinite(value) for value in metrics.values())
    by_key = cells(record)
    for (mode, gamma, batch), cell in by_key.items():
        name = f"speedup/{mode}_g{gamma}_b{batch}"
        assert metrics.get(name, 1.0) == cell["speedup"]["median"]
    best = max(c["speedup"]["median"] for c in record["cells"] if c["gamma"])
    assert metrics["speedup/best"] == best
    assert 1 <= metrics["accept/decoded_rejection_g3"] <= 4


def test_provenance_lies_beside_the_record(made, tiny_policy):
    record = read_manifest(made[0] / "throughput", "provenance.json")
    assert record["stage"] == "throughput"
    assert record["inputs"]["policy"]["hash"] == hash_path(tiny_policy)


def test_report_shows_the_verdict_the_plots_and_what_was_run(made):
    page = (made[0] / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "Where the time goes" in page
    assert "at most 6 tokens, temperature 1" in page
    assert "The diagnosis advised rejection γ=2 up to batch 1" in page
    assert "Only 2 repeats of some settings: the spread says little." in page


def test_lengths_are_equal_when_stops_are_ignored(
    tiny_dataset, tiny_policy, write_advice, tmp_path
):
    run(
        CONFIG.model_copy(update={"ignore_stop": True, "batch_sizes": (2,), "repeats": 1}),
        dataset=tiny_dataset,
        policy=tiny_policy,
        diagnosis=write_advice(verdict="off"),
        throughput=tmp_path / "throughput",
        report=tmp_path / "report.html",
    )
    record = read_manifest(tmp_path / "throughput", "throughput.json")
    assert {cell["response_length"] for cell in record["cells"]} == {6.0}
    assert {cell["tokens"] for cell in record["cells"]} == {12.0}
    assert record["workload"]["ends"] == "at max_tokens"
    assert "Stop tokens are ignored" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("broken", ["dataset", "policy", "diagnosis"])
def test_unusable_input_is_one_error_and_leaves_no_output(
    broken, tiny_dataset, tiny_policy, write_advice, tmp_path
):
    inputs = {"dataset": tiny_dataset, "policy": tiny_policy, "diagnosis": write_advice()}
    (tmp_path / "empty").mkdir()
    inputs[broken] = tmp_path / "empty"
    with pytest.raises(BebopError, match="empty"):
        run(CONFIG, **inputs, throughput=tmp_path / "out" / "t", report=tmp_path / "out" / "r")
    assert not (tmp_path / "out").exists()


def test_head_of_another_backbone_is_refused(tiny_dataset, tiny_policy, write_advice, tmp_path):
    from bebop.provenance import link_or_copy_tree

    policy = tmp_path / "policy"
    link_or_copy_tree(tiny_policy, policy)
    meta = json.loads((policy / "head.json").read_text())
    (policy / "head.json").unlink()
    (policy / "head.json").write_text(json.dumps({**meta, "vocab_size": 65}))
    with pytest.raises(ArtifactError, match="vocabulary"):
        run(
            CONFIG,
            dataset=tiny_dataset,
            policy=policy,
            diagnosis=write_advice(),
            throughput=tmp_path / "t",
            report=tmp_path / "r",
        )


def test_command_line_runs_the_stage(tiny_dataset, tiny_policy, write_advice, tmp_path, capsys):
    main(
        Config,
        run,
        inputs=("dataset", "policy", "diagnosis"),
        outputs=("throughput", "report"),
        arguments=[
            *("--dataset", str(tiny_dataset), "--policy", str(tiny_policy)),
            *("--diagnosis", str(write_advice()), "-o", str(tmp_path / "out")),
            *("--batch-sizes", "[1]", "--gammas", "[1]", "--modes", '["rejection"]'),
            *("--repeats", "1", "--requests", "1", "--max-tokens", "4", "--cost-seconds", "0"),
        ],
    )
    assert "speedup/rejection_g1_b1" in capsys.readouterr().out
    assert (tmp_path / "out" / "report.html").exists()
    assert (tmp_path / "out" / "throughput" / "throughput.json").exists()


def test_advised_setting_is_always_measured():
    settings = list_settings(["rejection"], [1], Advice(Setting("target_only", 4), 8))
    assert settings == [PLAIN, Setting("rejection", 1), Setting("target_only", 4)]
    assert list_settings(["rejection"], [1], Advice(PLAIN, 0)) == [PLAIN, Setting("rejection", 1)]


@pytest.mark.parametrize(
    ("key", "value"),
    [("gammas", []), ("gammas", [0]), ("batch_sizes", [2, 2]), ("modes", ["off"]), ("repeats", 0)],
)
def test_config_that_measures_nothing_is_refused(key, value):
    with pytest.raises(BebopError, match=f"throughput.{key}"):
        Config.from_values({key: value})


def test_processor_is_named_as_the_kernel_does(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: Example CPU @ 2 GHz\nmodel name\t: second\n")
    assert cpu_name(info) == "Example CPU @ 2 GHz"
    assert cpu_name(tmp_path / "absent")


def test_readme_documents_every_key_of_config_record_and_cell(made):
    readme = (Path(stage.__file__).parent / "README.md").read_text()
    record = made[2]
    names = {*Config.model_fields, *record, *record["cells"][0], *record["verdict"]} - {"version"}
    assert [name for name in sorted(names) if f"`{name}`" not in readme] == []
    for key, field in Config.model_fields.items():
        assert f"| `{key}` | `{json.dumps(field.default)}` | {field.description} |" in readme
