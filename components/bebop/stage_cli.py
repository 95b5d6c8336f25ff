"""`python -m bebop.<stage>`: the command line of a stage, made from its `Config`."""

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

from bebop.config import StageConfig, parse_value, stage_of
from bebop.errors import ConfigError
from bebop.stage_main import Run, checked_input, run_stage, user_errors


def make_parser(
    config_type: type[StageConfig], inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> argparse.ArgumentParser:
    """A parser with one option an input, one a config field, and `-o` for the outputs."""
    stage = stage_of(config_type)
    made = ", ".join(outputs)
    parser = argparse.ArgumentParser(
        prog=f"python -m bebop.{stage}",
        description=f"Run the stage {stage}; it writes {made}.",
        allow_abbrev=False,  # a new key must not change what an old command line means
    )
    for name in inputs:
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="PATH")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML or JSON with the keys")
    group = parser.add_argument_group("config")
    for key, field in config_type.model_fields.items():
        text = (field.description or "").replace("%", "%%")
        default = "required" if field.is_required() else f"default: {field.default!r}"
        group.add_argument(
            f"--{key.replace('_', '-')}",
            dest=f"key_{key}",
            metavar="VALUE",
            help=f"{text} ({default})".replace("%%", "%").replace("%", "%%"),
        )
    return parser


def read_config_file(path: Path | None) -> dict[str, Any]:
    """Plain values from a TOML or JSON file.

    Raises:
        ConfigError: missing file or a syntax error.
    """
    if path is None:
        return {}
    try:
        text = path.read_text()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"the config file cannot be read: {error}", where=str(path), fix="Pass TOML or JSON"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(
            "the config file holds no table", where=str(path), fix="Write one key a line"
        )
    return values


def main(
    config_type: type[StageConfig],
    run: Run,
    *,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    arguments: list[str] | None = None,
) -> None:
    """Parse the command line, run the stage, print its metrics.

    Args:
        config_type: the stage's `Config`.
        run: the stage's `run`.
        inputs: names of the input artifacts.
        outputs: names of the output artifacts; `report` is written as `report.html`.
        arguments: command line; default `sys.argv[1:]`.
    """
    options = make_parser(config_type, inputs, outputs).parse_args(arguments)
    with user_errors():
        values = read_config_file(options.config)
        for key in config_type.model_fields:
            text = getattr(options, f"key_{key}")
            if text is not None:
                values[key] = parse_value(config_type, key, text)
        record = run_stage(
            config_type.from_values(values),
            run,
            inputs={name: checked_input(name, getattr(options, name)) for name in inputs},
            outputs={
                name: options.output / ("report.html" if name == "report" else name)
                for name in outputs
            },
        )
    for name, value in record["metrics"].items():
        print(f"{name:32} {value:.6g}")
    print(f"{record['stage']} took {record['seconds']:.1f} s; outputs are in {options.output}")
