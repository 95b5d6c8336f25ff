"""Real rollout workers on a real local Ray."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from bebop.errors import StageError
from bebop.models.backbone import load_backbone
from bebop.models.checkpoint import HeadMeta, save_model
from bebop.models.mtp_head import new_head
from bebop.rollout.actors import Generated, Job, Lost, RolloutFleet, WorkerSettings
from bebop.rollout.engine import Request, SamplingParams, Speculation
from bebop.rollout.torch_engine import TorchEngine

SPECULATION = Speculation("rejection", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_backbone_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("actors") / "model"
    backbone = load_backbone(tiny_backbone_dir)
    save_model(folder, backbone, new_head(backbone), HeadMeta(), unchanged=tiny_backbone_dir)
    return folder


def fleet_of(model: Path, workers: int = 1) -> RolloutFleet:
    settings = WorkerSettings(str(model), SPECULATION, max_batch=4, max_length=300)
    return RolloutFleet(settings, workers, timeout=120)


@pytest.fixture(scope="module")
def fleet(local_ray, model):
    """One worker with the model folder's weights, for tests that publish none."""
    fleet = fleet_of(model)
    yield fleet
    fleet.close()


def requests(count: int = 4, tokens: int = 12, first: int = 0) -> tuple[Request, ...]:
    sampling = SamplingParams(max_tokens=tokens)
    return tuple(
        Request(f"{n}", (5, 6, 7 + n % 3), sampling, n) for n in range(first, first + count)
    )


def local_engine(model: Path) -> TorchEngine:
    backbone = load_backbone(model)
    head = new_head(backbone).requires_grad_(False)
    return TorchEngine(backbone, head, speculation=SPECULATION, max_batch=4, max_length=300)


def test_a_worker_samples_what_an_engine_in_this_process_samples(fleet, model):
    got = fleet.generate(Job((0,), requests()))
    expected = local_engine(model).generate(requests())
    assert [c.tokens for c in got] == [c.tokens for c in expected]
    assert [c.logprobs for c in got] == [c.logprobs for c in expected]
    assert {v for c in got for v in c.versions} == {0}


def test_published_weights_are_used_and_their_version_is_on_every_token(local_ray, model):
    fleet = fleet_of(model)
    before = fleet.generate(Job((0,), requests()))
    name = "model.layers.1.mlp.down_proj.weight"
    weight = dict(load_backbone(model).model.named_parameters())[name]
    tensors = {name: weight + torch.randn(weight.shape)}
    fleet.publish(tensors, version=3)
    after = fleet.generate(Job((0,), requests()))
    engine = local_engine(model)
    engine.load_weights(tensors, 3)
    assert [c.tokens for c in after] == [c.tokens for c in engine.generate(requests())]
    assert [c.tokens for c in after] != [c.tokens for c in before]
    assert {v for c in after for v in c.versions} == {3}
    fleet.close()


def test_jobs_are_spread_over_the_workers(local_ray, model):
    fleet = fleet_of(model, workers=2)
    assert len(set(fleet.pids())) == 2
    for number in range(4):
        fleet.submit(Job((number,), requests(2, first=2 * number)))
    results = [fleet.wait() for _ in range(4)]
    assert all(isinstance(result, Generated) for result in results)
    assert sorted(result.job.sequences for result in results) == [(0,), (1,), (2,), (3,)]
    fleet.close()


def test_a_killed_worker_loses_its_jobs_once_each_and_is_replaced(fleet, model):
    (pid,), replaced = fleet.pids(), fleet.replaced
    jobs = [Job((n,), requests(4, tokens=120, first=4 * n)) for n in range(2)]
    for job in jobs:
        fleet.submit(job)
    os.kill(pid, signal.SIGKILL)
    lost = [fleet.wait(), fleet.wait()]
    assert all(isinstance(result, Lost) for result in lost)
    assert sorted(result.job.sequences for result in lost) == [(0,), (1,)]
    assert fleet.replaced == replaced + 1
    again = fleet.generate(jobs[0])
    assert [c.tokens for c in again] == [
        c.tokens for c in local_engine(model).generate(jobs[0].requests)
    ]
    assert fleet.pids() != [pid]


def test_a_worker_that_cannot_start_is_a_clear_error(local_ray, tmp_path):
    fleet = fleet_of(tmp_path / "nothing")
    with pytest.raises(StageError, match=r"cannot start.*head\.json"):
        fleet.pids()
    fleet.close()


def test_an_error_inside_a_worker_is_a_clear_error(fleet):
    fleet.submit(Job((0,), (Request("long", (5,) * 400, SamplingParams(), 0),)))
    with pytest.raises(StageError, match=r"a rollout worker failed.*400 prompt tokens"):
        fleet.wait()


DRIVER = """
import sys, time
from bebop.rollout.actors import *
from bebop.rollout.engine import *
with ray_session("", 1, SMALLEST_OBJECT_STORE):
    settings = WorkerSettings(sys.argv[1], Speculation(), max_batch=4, max_length=512)
    fleet = RolloutFleet(settings, 1, timeout=120)
    fleet.pids()
    requests = [Request(str(n), (5,), SamplingParams(max_tokens=500), n) for n in range(4000)]
    fleet.submit(Job((0,), tuple(requests)))
    print("sampling", flush=True)
    time.sleep(600)
"""


def test_a_killed_driver_leaves_no_process_behind(model):
    command = [sys.executable, "-c", DRIVER, str(model)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "sampling\n"
        family = psutil.Process(driver.pid).children(recursive=True)
        assert any("RolloutWorker" in " ".join(process.cmdline()) for process in family)
    finally:
        driver.kill()
        driver.wait()
    deadline = time.monotonic() + 30
    while alive := [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.2)
