"""The compiled IR: parses, is what Kubeflow users build on, and needs no heavy library."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from bebop.errors import ConfigError
from workflows.compile import compile_pipeline
from workflows.stages import STAGES

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("pipeline_interface.json")
HEAVY = ("torch", "ray", "transformers", "mlflow", "reasoning_gym", "matplotlib")


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """The IR's YAML documents: the pipeline spec first."""
    path = compile_pipeline("tiny", [], tmp_path_factory.mktemp("ir") / "bebop.yaml")
    return list(yaml.safe_load_all(path.read_text()))


@pytest.fixture(scope="module")
def spec(documents):
    return json_format.ParseDict(documents[0], pipeline_spec_pb2.PipelineSpec())


def interface(spec) -> dict:
    """Names and types of parameters and artifacts, which users' scripts depend on."""
    kind = pipeline_spec_pb2.ParameterType.ParameterTypeEnum.Name

    def ports(definitions):
        parameters = {n: kind(p.parameter_type) for n, p in definitions.parameters.items()}
        artifacts = {n: a.artifact_type.schema_title for n, a in definitions.artifacts.items()}
        return dict(sorted({**parameters, **artifacts}.items()))

    return {
        "name": spec.pipeline_info.name,
        "parameters": ports(spec.root.input_definitions),
        "components": {
            name: {
                "inputs": ports(component.input_definitions),
                "outputs": ports(component.output_definitions),
            }
            for name, component in sorted(spec.components.items())
        },
    }


def test_names_and_types_equal_the_checked_in_list(spec):
    assert interface(spec) == json.loads(GOLDEN.read_text())


def test_stages_depend_on_what_they_read(spec):
    tasks = spec.root.dag.tasks
    assert set(tasks) == {stage.replace("_", "-") for stage in STAGES}
    assert set(tasks["grpo"].dependent_tasks) == {"data-prep", "mtp-sft", "diagnosis"}


def test_the_image_carries_the_commit(spec):
    executors = json_format.MessageToDict(spec.deployment_spec)["executors"]
    images = {executor["container"]["image"] for executor in executors.values()}
    assert len(images) == 1
    assert images.pop().partition(":")[2] not in ("", "latest")


def test_gpu_stages_carry_an_accelerator_and_shared_memory(tmp_path):
    profile = tmp_path / "gpu.toml"
    profile.write_text('[resources.grpo]\ngpus = 2\nmemory = "64Gi"\nshm = "16Gi"\n')
    path = compile_pipeline(str(profile), [], tmp_path / "gpu.yaml")
    spec, platform = yaml.safe_load_all(path.read_text())
    resources = spec["deploymentSpec"]["executors"]["exec-grpo"]["container"]["resources"]
    assert resources["accelerator"]["resourceCount"] == "2"
    deployment = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]["exec-grpo"]
    mount = deployment["emptyDirMounts"][0]
    assert (mount["mountPath"], mount["medium"], mount["sizeLimit"]) == (
        "/dev/shm",
        "Memory",
        "16Gi",
    )


def test_an_unknown_resource_is_refused(tmp_path):
    profile = tmp_path / "gpu.toml"
    profile.write_text("[resources.grpo]\ngpu = 2\n")
    with pytest.raises(ConfigError, match="unknown resource keys"):
        compile_pipeline(str(profile), [], tmp_path / "gpu.yaml")


def test_an_output_that_is_not_yaml_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="yaml"):
        compile_pipeline("tiny", [], tmp_path / "bebop.txt")


def test_compiling_loads_no_heavy_library_and_is_quick(tmp_path):
    code = (
        "import sys, time, pipeline\n"
        f"assert pipeline.main(['compile', '-o', {str(tmp_path / 'p.yaml')!r}]) == 0\n"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "assert not heavy, heavy\n"
        "assert time.process_time() < 3.0, 'CPU seconds, imports included'\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
