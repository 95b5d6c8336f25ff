"""Stage configuration: frozen, strict, and carried between processes as text.

Kubeflow turns integers inside dict parameters into floats, so a config crosses it as JSON text.
"""

import json
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bebop.errors import ConfigError


class StageConfig(BaseModel):
    """Base of every stage's `Config`: unknown keys are errors, instances cannot change."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    seed: int = Field(0, ge=0, description="Seed of every random stream of the stage.")
    threads: int = Field(0, ge=0, description="Torch threads; 0 leaves torch's own choice.")

    def to_text(self) -> str:
        """The config as JSON text, every field present."""
        return self.model_dump_json()

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse JSON text; an empty string means all defaults.

        Raises:
            ConfigError: the text is not JSON, or a key or value is not allowed.
        """
        try:
            values = json.loads(text or "{}")
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"the config is not JSON: {error}", where=cls.__module__, fix="Pass a JSON object"
            ) from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"the config is {values!r}", where=cls.__module__, fix="Pass a JSON object"
            )
        return cls.from_values(values)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """Validate plain values.

        Raises:
            ConfigError: with the key, the reason and the keys that exist.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            raise config_error(cls, error) from None


def stage_of(config_type: type[StageConfig]) -> str:
    """Name of the stage package in which the config type lives."""
    return config_type.__module__.split(".")[1]


def config_error(config_type: type[StageConfig], error: ValidationError) -> ConfigError:
    """Turn pydantic's list into one message that names key, reason and remedy."""
    stage = stage_of(config_type)
    reasons, keys, unknown_keys = [], set(), False
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(whole)"
        unknown = item["type"] == "extra_forbidden"
        unknown_keys |= unknown
        reasons.append(f"{key}: {'unknown key' if unknown else item['msg']}")
        keys.add(key)
    known = ", ".join(sorted(config_type.model_fields))
    return ConfigError(
        f"invalid config of {stage}: {'; '.join(reasons)}",
        where=", ".join(f"{stage}.{key}" for key in sorted(keys)),
        fix=f"Keys of {stage}: {known}"
        if unknown_keys
        else f"python -m bebop.{stage} --help explains each key",
    )


def parse_value(config_type: type[StageConfig], key: str, text: str) -> Any:
    """Read a command-line value: JSON where it parses, else the bare string.

    A field that takes strings keeps its text, so that `--model 123` stays a name.
    """
    field = config_type.model_fields.get(key)
    if field is not None and _takes_text(field.annotation):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _takes_text(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return all(isinstance(option, str) for option in get_args(annotation))
    return annotation is str
