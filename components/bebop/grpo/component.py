"""Kubeflow contract of `grpo`."""

from kfp import dsl


@dsl.component(base_image="bebop-python", install_kfp_package=False)
def grpo(
    config: str,
    dataset: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    diagnosis: dsl.Input[dsl.Artifact],
    policy: dsl.Output[dsl.Model],
    report: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
):
    """Train the policy with asynchronous GRPO, the head frozen."""
    from bebop.grpo.stage import Config, run
    from bebop.stage_main import kfp_task

    inputs = {"dataset": dataset, "model": model, "diagnosis": diagnosis}
    outputs = {"policy": policy, "report": report}
    kfp_task(Config, run, config, inputs=inputs, outputs=outputs, metrics=metrics)
