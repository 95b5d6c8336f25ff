"""The work buffer: which prompt groups may be sampled, are being sampled, wait, were trained.

Groups are numbered in the order in which they are trained: step v of the trainer takes groups
v*P .. (v+1)*P - 1, where P is `groups_per_step`. A group moves along this line and nowhere else:

                  dispatch                complete              take
      WAITING ───────────────► RUNNING ───────────────► READY ─────────► TRAINED
         ▲                        │
         └────────────────────────┘
           requeue (its worker died)

Staleness is one knob. With the policy at version v, groups below (v + 1 + max_staleness) * P may
be dispatched. Group n is trained at version n // P, therefore a token of it was sampled by a
policy at most `max_staleness` versions older: the bound holds by admission, and no finished
sample is ever thrown away. 0 is synchronous GRPO.

Worked example, P = 2, max_staleness = 1, 3 steps:

    version 0   admit 0 1 2 3          the workers sample them with version 0
                0 1 ready -> take      the trainer works on step 0; 2 3 are sampled meanwhile
                advance                the update is done, its weights are published
    version 1   admit 4 5              (sampled with version 1)
                the worker of 3 dies -> requeue 3, dispatch it again
                2 3 ready -> take      2 was sampled by version 0: staleness 1; advance
    version 2   admit nothing          3 steps need no more groups
                4 5 ready -> take      staleness 1; advance; finished

A run that is resumed at version v starts a new buffer at v: groups below v*P were trained, every
other one is WAITING again, whatever it was when the process died. So no group is lost and none is
counted twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from bebop.errors import StageError
from bebop.rollout.engine import Completion


class GroupState(Enum):
    """Where a group is; see the picture above."""

    WAITING = "waiting"
    RUNNING = "running"
    READY = "ready"
    TRAINED = "trained"


@dataclass
class Group:
    """A prompt group in the buffer.

    Attributes:
        sequence: its number, which is also its place in the training order.
        state: see `GroupState`.
        dispatches: times it was given to a worker.
        completions: its samples once READY, in request order.
        rewards: one a completion.
    """

    sequence: int
    state: GroupState = GroupState.WAITING
    dispatches: int = 0
    completions: list[Completion] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


class WorkBuffer:
    """Bounded-staleness buffer over numbered groups.

    Args:
        steps: trainer steps of the whole run.
        groups_per_step: P.
        max_staleness: policy versions between sampling and training, at most.
        version: version of the policy to start from.
        max_dispatches: a group that killed its worker this often stops the run.
    """

    def __init__(
        self,
        steps: int,
        groups_per_step: int,
        max_staleness: int,
        *,
        version: int = 0,
        max_dispatches: int = 3,
    ) -> None:
        if steps < 1 or groups_per_step < 1 or max_staleness < 0 or max_dispatches < 1:
            raise ValueError("steps, groups and dispatches are at least 1, staleness at least 0")
        self.steps, self.groups_per_step = steps, groups_per_step
        self.max_staleness, self.max_dispatches = max_staleness, max_dispatches
        self.version = version
        self.requeued = 0
        self._groups: dict[int, Group] = {}

    @property
    def finished(self) -> bool:
        """Whether every step was trained."""
        return self.version >= self.steps

    def waiting(self) -> list[int]:
        """Groups that may be dispatched now, in order."""
        return [n for n in self._admitted() if self.state(n) is GroupState.WAITING]

    def _admitted(self) -> range:
        """Groups from the step at hand on that the staleness bound lets in."""
        last_step = min(self.version + 1 + self.max_staleness, self.steps)
        return range(self.version * self.groups_per_step, last_step * self.groups_per_step)

    def state(self, sequence: int) -> GroupState:
        """State of a group, also of one that is not admitted yet."""
        if sequence in self._groups:
            return self._groups[sequence].state
        trained = sequence < self.version * self.groups_per_step
        return GroupState.TRAINED if trained else GroupState.WAITING

    def dispatch(self, sequences: Iterable[int]) -> None:
        """WAITING -> RUNNING: a worker has them.

        Raises:
            StageError: a group was dispatched too often.
        """
        for sequence in sequences:
            assert sequence in self._admitted(), f"group {sequence} would be too stale"
            group = self._move(sequence, GroupState.WAITING, GroupState.RUNNING)
            group.dispatches += 1
            if group.dispatches > self.max_dispatches:
                raise StageError(
                    f"prompt group {sequence} lost its rollout worker {self.max_dispatches} times",
                    where="rollout",
                    fix="Look for memory or driver errors above; fewer samples a step need less",
                )

    def requeue(self, sequences: Iterable[int]) -> None:
        """RUNNING -> WAITING: their worker died before it answered."""
        for sequence in sequences:
            self._move(sequence, GroupState.RUNNING, GroupState.WAITING)
            self.requeued += 1

    def complete(
        self, sequence: int, completions: Sequence[Completion], rewards: Sequence[float]
    ) -> None:
        """RUNNING -> READY: sampled and scored."""
        assert len(completions) == len(rewards) > 0
        group = self._move(sequence, GroupState.RUNNING, GroupState.READY)
        group.completions, group.rewards = list(completions), list(rewards)

    def step_ready(self) -> bool:
        """Whether every group of the step at hand is READY."""
        return all(self.state(n) is GroupState.READY for n in self._step_groups())

    def take(self) -> list[Group]:
        """READY -> TRAINED for the step at hand."""
        taken = [self._move(n, GroupState.READY, GroupState.TRAINED) for n in self._step_groups()]
        for group in taken:
            oldest = min(min(c.versions, default=self.version) for c in group.completions)
            assert self.version - oldest <= self.max_staleness, (group.sequence, oldest)
        return taken

    def advance(self) -> None:
        """The step was trained: the policy has the next version, and its groups are let go."""
        for sequence in self._step_groups():
            assert self.state(sequence) is GroupState.TRAINED, sequence
            del self._groups[sequence]
        self.version += 1

    def _step_groups(self) -> range:
        first = self.version * self.groups_per_step
        return range(first, first + self.groups_per_step)

    def _move(self, sequence: int, before: GroupState, after: GroupState) -> Group:
        state = self.state(sequence)
        assert state is before, f"group {sequence} is {state.value}, not {before.value}"
        group = self._groups.setdefault(sequence, Group(sequence))
        group.state = after
        return group
