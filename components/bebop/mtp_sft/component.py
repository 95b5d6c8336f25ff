"""Kubeflow contract of `mtp_sft`."""

from kfp import dsl


@dsl.component(base_image="bebop-python", install_kfp_package=False)
def mtp_sft(
    config: str,
    dataset: dsl.Input[dsl.Dataset],
    backbone: dsl.Input[dsl.Model],
    model: dsl.Output[dsl.Model],
    report: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
):
    """Train the MTP head on the frozen backbone."""
    from bebop.mtp_sft.stage import Config, run
    from bebop.stage_main import kfp_task

    inputs = {"dataset": dataset, "backbone": backbone}
    outputs = {"model": model, "report": report}
    kfp_task(Config, run, config, inputs=inputs, outputs=outputs, metrics=metrics)
