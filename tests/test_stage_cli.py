"""The command line of a stage is its `Config`."""

import importlib
import subprocess
import sys

import pytest
from pydantic import Field

from bebop.config import StageConfig
from bebop.errors import ConfigError
from bebop.stage_cli import main, make_parser, read_config_file

STAGES = ("data_prep", "mtp_sft", "diagnosis", "grpo", "throughput")


class Config(StageConfig):
    """A config like a stage's."""

    steps: int = Field(3, ge=1, description="Training steps (100% of them).")
    learning_rate: float = Field(1e-3, description="Learning rate.")
    model: str = Field("smollm2", description="Model name.")
    batch_sizes: tuple[int, ...] = Field((1, 8), description="Batch sizes.")


Config.__module__ = "bebop.mtp_sft.stage"


def run(config, *, dataset, model, report, tracker, checkpoints):
    """Write the config where the test can read it."""
    model.parent.mkdir(parents=True, exist_ok=True)
    model.write_text(config.to_text())
    report.write_text("<p>done</p>")
    return {"accept/length": 1.5}


@pytest.fixture
def start(tmp_path):
    (tmp_path / "data").mkdir()

    def call(*options: str) -> Config:
        arguments = ["--dataset", str(tmp_path / "data"), "-o", str(tmp_path / "out"), *options]
        main(Config, run, inputs=("dataset",), outputs=("model", "report"), arguments=arguments)
        return Config.from_text((tmp_path / "out" / "model").read_text())

    return call


def test_defaults_run_and_metrics_are_printed(start, capsys, tmp_path):
    assert start() == Config()
    printed = capsys.readouterr().out
    assert "accept/length                    1.5" in printed
    assert f"outputs are in {tmp_path / 'out'}" in printed
    assert (tmp_path / "out" / "report.html").exists()


def test_options_are_read_with_their_fields_types(start):
    config = start(
        "--steps", "5", "--learning-rate", "3e-4", "--model", "123", "--batch-sizes", "[2, 4]"
    )
    assert config == Config(steps=5, learning_rate=3e-4, model="123", batch_sizes=(2, 4))


@pytest.mark.parametrize(
    ("name", "text"), [("c.toml", "steps = 4\nseed = 9\n"), ("c.json", '{"steps": 4, "seed": 9}')]
)
def test_options_win_over_the_file(start, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    config = start("--config", str(tmp_path / name), "--steps", "6")
    assert config == Config(steps=6, seed=9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--steps", "0"), "steps: Input should be greater than or equal to 1"),
        (("--steps", "many"), "mtp_sft.steps"),
        (("--config", "/no/such/file.toml"), "the config file cannot be read"),
    ],
)
def test_bad_values_end_in_one_message(start, capsys, options, said):
    with pytest.raises(SystemExit) as caught:
        start(*options)
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_missing_input_ends_in_one_message(tmp_path, capsys):
    arguments = ["--dataset", str(tmp_path / "gone"), "-o", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as caught:
        main(Config, run, inputs=("dataset",), outputs=("model", "report"), arguments=arguments)
    assert caught.value.code == 1
    assert "no dataset there" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--stepz", "--step"])
def test_unknown_and_shortened_options_are_refused(start, capsys, option):
    with pytest.raises(SystemExit) as caught:
        start(option, "3")
    assert caught.value.code == 2
    assert f"unrecognized arguments: {option}" in capsys.readouterr().err


def test_help_shows_every_key_with_meaning_and_default():
    text = make_parser(Config, ("dataset",), ("model", "report")).format_help()
    flat = " ".join(text.split())
    assert "--dataset PATH" in flat
    assert "--learning-rate VALUE Learning rate. (default: 0.001)" in flat
    assert "Training steps (100% of them). (default: 3)" in flat
    assert "--seed VALUE" in flat
    assert "it writes model, report" in flat


@pytest.mark.parametrize(("name", "text"), [("c.toml", "steps ="), ("c.json", "{"), ("c", "{}")])
def test_config_file_with_a_syntax_error_is_named(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{tmp_path / name}"):
        read_config_file(tmp_path / name)


@pytest.mark.parametrize("text", ["[1]", '"steps"'])
def test_config_file_that_is_no_table_is_refused(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError, match=r"c\.json"):
        read_config_file(tmp_path / "c.json")


@pytest.mark.parametrize("stage", STAGES)
def test_help_of_each_stage_is_light_and_complete(stage):
    code = (
        f"import sys; sys.argv = ['x', '--help']\n"
        f"from bebop.stage_cli import main\n"
        f"from bebop.{stage}.stage import Config, run\n"
        "try:\n    main(Config, run, inputs=(), outputs=())\n"
        "except SystemExit as e:\n"
        "    heavy = {'torch', 'ray', 'transformers', 'mlflow', 'kfp'} & set(sys.modules)\n"
        "    sys.exit(f'imports {heavy}' if heavy else e.code)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    config_type = importlib.import_module(f"bebop.{stage}.stage").Config
    for key, field in config_type.model_fields.items():
        assert f"--{key.replace('_', '-')} VALUE" in result.stdout
        assert field.description, key
