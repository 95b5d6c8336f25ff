"""Kubeflow contract of `diagnosis`."""

from kfp import dsl


@dsl.component(base_image="bebop-python", install_kfp_package=False)
def diagnosis(
    config: str,
    dataset: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    diagnosis: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
):
    """Say whether speculation will pay, with which sampler and gamma."""
    from bebop.diagnosis.stage import Config, run
    from bebop.stage_main import kfp_task

    inputs = {"dataset": dataset, "model": model}
    outputs = {"diagnosis": diagnosis, "report": report}
    kfp_task(Config, run, config, inputs=inputs, outputs=outputs, metrics=metrics)
