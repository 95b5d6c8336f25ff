"""Kubeflow contract of `data_prep`."""

from kfp import dsl


@dsl.component(base_image="bebop-python", install_kfp_package=False)
def data_prep(
    config: str,
    dataset: dsl.Output[dsl.Dataset],
    backbone: dsl.Output[dsl.Model],
    report: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
):
    """Make prompts, on-policy training text and the backbone folder."""
    from bebop.data_prep.stage import Config, run
    from bebop.stage_main import kfp_task

    outputs = {"dataset": dataset, "backbone": backbone, "report": report}
    kfp_task(Config, run, config, inputs={}, outputs=outputs, metrics=metrics)
