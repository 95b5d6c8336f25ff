"""Compiles the graph to the IR that Kubeflow Pipelines accepts."""

import os
from collections.abc import Sequence
from pathlib import Path

from kfp import compiler

from bebop.errors import ConfigError
from bebop.provenance import git_sha
from workflows.bebop import make_pipeline
from workflows.profile import load_profile
from workflows.stages import STAGES

REPOSITORY = "bebop-python"


def default_image() -> str:
    """Image by commit: no cache key covers imported code, so the tag must change with it."""
    registry = os.environ.get("BEBOP_REGISTRY", "")
    name = f"{registry.rstrip('/')}/{REPOSITORY}" if registry else REPOSITORY
    return f"{name}:{git_sha()}"


def compile_pipeline(
    profile_name: str, overrides: Sequence[str], output: Path, image: str | None = None
) -> Path:
    """Write the pipeline's IR (YAML), with the profile's configs as parameter defaults.

    Args:
        profile_name: name or path of a profile.
        overrides: `STAGE.KEY=VALUE` strings.
        output: file ending in .yaml, .yml or .json.
        image: container image of every stage; default: `default_image()`.

    Raises:
        ConfigError: a bad profile, or an output name that kfp does not write.
    """
    if output.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(
            f"cannot compile to {output.suffix or 'a name without an ending'}",
            where=str(output),
            fix="End the name in .yaml",
        )
    profile = load_profile(profile_name, overrides)
    pipeline = make_pipeline(profile, STAGES, image=image or default_image())
    output.parent.mkdir(parents=True, exist_ok=True)
    compiler.Compiler().compile(pipeline, str(output))
    return output
