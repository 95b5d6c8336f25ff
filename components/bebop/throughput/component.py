"""Kubeflow contract of `throughput`."""

from kfp import dsl


@dsl.component(base_image="bebop-python", install_kfp_package=False)
def throughput(
    config: str,
    dataset: dsl.Input[dsl.Dataset],
    policy: dsl.Input[dsl.Model],
    diagnosis: dsl.Input[dsl.Artifact],
    throughput: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
):
    """Measure the speed-up of speculation on this machine."""
    from bebop.stage_main import kfp_task
    from bebop.throughput.stage import Config, run

    inputs = {"dataset": dataset, "policy": policy, "diagnosis": diagnosis}
    outputs = {"throughput": throughput, "report": report}
    kfp_task(Config, run, config, inputs=inputs, outputs=outputs, metrics=metrics)
