"""Run profiles: one TOML table a stage, with only what differs from the stage's defaults."""

import importlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bebop.config import StageConfig, parse_value
from bebop.errors import ConfigError
from workflows.stages import STAGES

PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Profile:
    """A named set of stage configs.

    Attributes:
        name: "tiny", "laptop", or the stem of a file.
        configs: stage name to its validated config.
        resources: stage name to what its pod needs (see `workflows.resources`).
    """

    name: str
    configs: Mapping[str, StageConfig]
    resources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def texts(self) -> dict[str, str]:
        """Stage name to config text, as it crosses Kubeflow."""
        return {stage: config.to_text() for stage, config in self.configs.items()}


def profile_names() -> list[str]:
    """Names of the profiles that come with bebop."""
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def load_profile(name: str, overrides: Sequence[str] = ()) -> Profile:
    """Read a profile by name or path and apply `STAGE.KEY=VALUE` overrides.

    Raises:
        ConfigError: unknown profile, stage, key or value; bad TOML; a malformed override.
    """
    tables = _read(name)
    resources = tables.pop("resources", {})
    _check_stages(tables, f"profile {name}")
    _check_stages(resources, f"[resources] of profile {name}")
    for override in overrides:
        _apply(tables, override)
    configs = {stage: config_type(stage).from_values(tables.get(stage, {})) for stage in STAGES}
    return Profile(Path(name).stem, configs, resources)


def config_type(stage: str) -> type[StageConfig]:
    """The `Config` class of a stage."""
    module = importlib.import_module(f"bebop.{stage}.stage")
    found: type[StageConfig] = module.Config
    return found


def override_values(
    values: Mapping[str, Mapping[str, Any]], overrides: Sequence[str]
) -> dict[str, StageConfig]:
    """Configs from plain recorded values plus overrides, for a rerun.

    Raises:
        ConfigError: as `load_profile`.
    """
    tables = {stage: dict(table) for stage, table in values.items()}
    _check_stages(tables, "run.json")
    for override in overrides:
        _apply(tables, override)
    return {stage: config_type(stage).from_values(tables.get(stage, {})) for stage in STAGES}


def _read(name: str) -> dict[str, Any]:
    known = PROFILES / f"{name}.toml"
    path = known if known.is_file() else Path(name)
    if path.suffix != ".toml" or not path.is_file():
        raise ConfigError(
            f"no profile {name!r}",
            where="--profile",
            fix=f"Profiles are {', '.join(profile_names())}, or give the path of a .toml file",
        )
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the profile is not TOML: {error}", where=str(path), fix="Correct that line"
        ) from error


def _check_stages(tables: Mapping[str, Any], where: str) -> None:
    for stage, table in tables.items():
        if stage not in STAGES:
            raise ConfigError(
                f"no stage {stage!r}", where=where, fix=f"Stages are {', '.join(STAGES)}"
            )
        if not isinstance(table, Mapping):
            raise ConfigError(
                f"{stage} is not a table", where=where, fix=f"Write its keys under [{stage}]"
            )


def _apply(tables: dict[str, Any], override: str) -> None:
    target, equals, text = override.partition("=")
    stage, dot, key = target.partition(".")
    if not (equals and dot and key):
        raise ConfigError(
            f"{override!r} is not an override", where="--set", fix="Write STAGE.KEY=VALUE"
        )
    _check_stages({stage: {}}, f"--set {override}")
    tables.setdefault(stage, {})[key] = parse_value(config_type(stage), key, text)
