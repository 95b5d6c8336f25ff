"""The buffer's life cycle, its staleness bound, and that nothing is lost or counted twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.errors import StageError
from bebop.rollout.buffer import GroupState, WorkBuffer
from bebop.rollout.engine import Completion


def answer(version: int) -> tuple[list[Completion], list[float]]:
    return [Completion("x", tokens=[1], logprobs=[0.0], versions=[version])], [1.0]


def finish(buffer: WorkBuffer, sequences: list[int], version: int) -> None:
    for sequence in sequences:
        buffer.complete(sequence, *answer(version))


def test_the_worked_example_of_the_docstring():
    buffer = WorkBuffer(steps=3, groups_per_step=2, max_staleness=1)
    assert buffer.waiting() == [0, 1, 2, 3]
    buffer.dispatch([0, 1, 2, 3])
    finish(buffer, [0, 1], 0)
    assert [g.sequence for g in buffer.take()] == [0, 1]
    buffer.advance()
    assert buffer.waiting() == [4, 5]
    buffer.dispatch([4, 5])
    buffer.requeue([3])
    assert buffer.waiting() == [3]
    buffer.dispatch([3])
    finish(buffer, [2], 0)
    assert not buffer.step_ready()
    finish(buffer, [3], 1)
    assert [g.sequence for g in buffer.take()] == [2, 3]
    buffer.advance()
    assert buffer.waiting() == []
    finish(buffer, [4, 5], 1)
    buffer.take()
    buffer.advance()
    assert buffer.finished
    assert buffer.requeued == 1


def test_zero_staleness_admits_one_step_at_a_time():
    buffer = WorkBuffer(steps=5, groups_per_step=3, max_staleness=0)
    assert buffer.waiting() == [0, 1, 2]
    buffer.dispatch([0, 1, 2])
    finish(buffer, [0, 1, 2], 0)
    assert buffer.waiting() == []
    buffer.take()
    assert buffer.waiting() == []
    buffer.advance()
    assert buffer.waiting() == [3, 4, 5]


def test_a_resumed_buffer_starts_after_what_was_trained():
    buffer = WorkBuffer(steps=4, groups_per_step=2, max_staleness=1, version=2)
    assert buffer.waiting() == [4, 5, 6, 7]
    assert buffer.state(3) is GroupState.TRAINED
    assert buffer.state(4) is GroupState.WAITING


def test_a_group_that_keeps_killing_workers_stops_the_run():
    buffer = WorkBuffer(steps=1, groups_per_step=1, max_staleness=0, max_dispatches=2)
    for _ in range(2):
        buffer.dispatch([0])
        buffer.requeue([0])
    with pytest.raises(StageError, match="group 0 lost its rollout worker 2 times"):
        buffer.dispatch([0])


def test_transitions_off_the_line_are_refused():
    buffer = WorkBuffer(steps=2, groups_per_step=1, max_staleness=0)
    with pytest.raises(AssertionError):
        buffer.take()
    with pytest.raises(AssertionError):
        buffer.dispatch([1])
    buffer.dispatch([0])
    with pytest.raises(AssertionError):
        buffer.dispatch([0])
    buffer.complete(0, *answer(0))
    with pytest.raises(AssertionError):
        buffer.complete(0, *answer(0))
    with pytest.raises(AssertionError):
        buffer.requeue([0])
    with pytest.raises(AssertionError):
        buffer.advance()


def test_too_stale_a_token_is_an_error_and_not_a_sample():
    buffer = WorkBuffer(steps=3, groups_per_step=1, max_staleness=0, version=2)
    buffer.dispatch(buffer.waiting())
    buffer.complete(2, *answer(1))
    with pytest.raises(AssertionError):
        buffer.take()


@pytest.mark.parametrize("bad", [{"steps": 0}, {"groups_per_step": 0}, {"max_staleness": -1}])
def test_sizes_are_checked(bad):
    with pytest.raises(ValueError, match="at least"):
        WorkBuffer(**{"steps": 1, "groups_per_step": 1, "max_staleness": 0, **bad})


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_any_order_of_events_trains_every_group_once_within_the_bound(
    data, steps, per_step, staleness
):
    buffer = WorkBuffer(steps, per_step, staleness, max_dispatches=10**6)
    running: dict[int, int] = {}
    trained: list[int] = []
    while not buffer.finished:
        waiting = buffer.waiting()
        moves = ["dispatch"] * bool(waiting) + ["finish", "die"] * bool(running)
        moves += ["train"] * buffer.step_ready()
        move = data.draw(st.sampled_from(moves))
        if move == "dispatch":
            chosen = data.draw(st.sampled_from(waiting))
            buffer.dispatch([chosen])
            running[chosen] = buffer.version
        elif move == "finish":
            chosen = data.draw(st.sampled_from(sorted(running)))
            buffer.complete(chosen, *answer(running.pop(chosen)))
        elif move == "die":
            chosen = data.draw(st.sampled_from(sorted(running)))
            buffer.requeue([chosen])
            del running[chosen]
        else:
            for group in buffer.take():
                assert buffer.version - group.completions[0].versions[0] <= staleness
                trained.append(group.sequence)
            buffer.advance()
    assert trained == list(range(steps * per_step))
