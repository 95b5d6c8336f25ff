"""The five-stage graph, whole or from one stage on with the rest imported."""

from collections.abc import Callable, Mapping
from typing import Any

from kfp import dsl

from bebop.data_prep.component import data_prep
from bebop.diagnosis.component import diagnosis
from bebop.grpo.component import grpo
from bebop.mtp_sft.component import mtp_sft
from bebop.throughput.component import throughput
from workflows.profile import Profile
from workflows.resources import apply_resources
from workflows.stages import CONTRACTS, needed_artifacts

COMPONENTS: Mapping[str, Callable[..., dsl.PipelineTask]] = {
    "data_prep": data_prep,
    "mtp_sft": mtp_sft,
    "diagnosis": diagnosis,
    "grpo": grpo,
    "throughput": throughput,
}
ARTIFACT_TYPES = {"dataset": dsl.Dataset, "backbone": dsl.Model, "model": dsl.Model}
ARTIFACT_TYPES |= {"policy": dsl.Model, "diagnosis": dsl.Artifact}
DESCRIPTION = (
    "Faster RL post-training: an MTP head trained with the end-to-end TV loss, "
    "verified by lossless rejection sampling, frozen through GRPO."
)


def make_pipeline(
    profile: Profile,
    stages: tuple[str, ...],
    *,
    imported: Mapping[str, Mapping[str, Any]] | None = None,
    image: str | None = None,
    environment: Mapping[str, Mapping[str, str]] | None = None,
) -> Any:
    """Build the graph.

    Args:
        profile: configs (they become the defaults of the pipeline's parameters) and resources.
        stages: the stages to run, in order.
        imported: artifact name to `{"uri", "metadata"}` for what `stages` do not write.
        image: container image for every stage; local runs need none.
        environment: stage name to environment variables of its task.

    Returns:
        A KFP pipeline; calling it runs it when `kfp.local` is initialised.
    """
    texts = profile.texts()
    sources = imported or {}
    assert set(sources) == set(needed_artifacts(stages)), "imported artifacts do not fit the stages"

    def add_stage(stage: str, config: Any, artifacts: dict[str, Any]) -> None:
        inputs = {name: artifacts[name] for name in CONTRACTS[stage].inputs}
        task = COMPONENTS[stage](config=config, **inputs)
        # Every run is made afresh: neither cache key covers the code in the image.
        task.set_caching_options(False)
        if image is not None:
            task.set_container_image(image).set_display_name(stage)
        for name, value in (environment or {}).get(stage, {}).items():
            task.set_env_variable(name, value)
        apply_resources(task, profile.resources.get(stage, {}), stage)
        artifacts.update({name: task.outputs[name] for name in CONTRACTS[stage].outputs})

    @dsl.pipeline(name="bebop", description=DESCRIPTION)
    def bebop(
        data_prep: str = texts["data_prep"],
        mtp_sft: str = texts["mtp_sft"],
        diagnosis: str = texts["diagnosis"],
        grpo: str = texts["grpo"],
        throughput: str = texts["throughput"],
    ):
        configs = {
            "data_prep": data_prep,
            "mtp_sft": mtp_sft,
            "diagnosis": diagnosis,
            "grpo": grpo,
            "throughput": throughput,
        }
        artifacts = {name: import_artifact(name, source) for name, source in sources.items()}
        for stage in stages:
            add_stage(stage, configs[stage], artifacts)

    return bebop


def import_artifact(name: str, source: Mapping[str, Any]) -> Any:
    """A task that brings in an artifact of an earlier run by its recorded address."""
    task = dsl.importer(
        artifact_uri=source["uri"],
        artifact_class=ARTIFACT_TYPES[name],
        reimport=False,
        metadata=dict(source.get("metadata", {})),
    )
    return task.output
