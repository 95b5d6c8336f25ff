"""The loop: dispatch, collect, take, probe, update, publish, record, save.

Trainer and driver are this process; rollout workers are others. With `max_staleness` above 0 the
workers already sample the next step's groups while this process updates the policy.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bebop.dataset import Prompt
from bebop.decoding.teacher_forced import Positions, Text, measure_positions
from bebop.grpo.checkpoint import Checkpoints, Progress
from bebop.grpo.prompts import PromptStream, derived_seed
from bebop.grpo.scoring import Scorer
from bebop.grpo.steplog import Clock, step_metrics
from bebop.grpo.trainer import ScoredGroup, Trainer, Update
from bebop.models.mtp_head import MTPHead
from bebop.progress import Progress as ProgressBar
from bebop.rewards.registry import check_spread
from bebop.rollout.actors import Generated, Job, Lost, RolloutFleet
from bebop.rollout.buffer import Group, WorkBuffer
from bebop.rollout.engine import Request
from bebop.tracking import Tracker


@dataclass(frozen=True)
class Plan:
    """What the loop needs to know of the config.

    Attributes:
        groups_per_job: groups a worker samples in one call.
        probe_samples: samples a step that are probed; 0 for none.
        probe_depths: draft depths of the probe.
        checkpoint_every: steps between checkpoints.
        eval_prompts: held-out prompts, each sampled once before and once after training.
    """

    groups_per_job: int
    probe_samples: int
    probe_depths: int
    checkpoint_every: int
    eval_prompts: Sequence[Prompt]


class Loop:
    """Joins buffer, fleet, scorer and trainer; `progress` is all that a resumed loop needs."""

    def __init__(
        self,
        plan: Plan,
        stream: PromptStream,
        scorer: Scorer,
        trainer: Trainer,
        head: MTPHead,
        fleet: RolloutFleet,
        buffer: WorkBuffer,
        progress: Progress,
        checkpoints: Checkpoints,
        tracker: Tracker,
    ) -> None:
        self.plan, self.stream, self.scorer = plan, stream, scorer
        self.trainer, self.head, self.fleet, self.buffer = trainer, head, fleet, buffer
        self.progress, self.checkpoints, self.tracker = progress, checkpoints, tracker
        self._waited = self._sampled = 0.0

    def run(self) -> None:
        """Train until every step is done."""
        self.publish()
        self.evaluate_before()
        with ProgressBar("grpo", self.buffer.steps) as bar:
            bar.advance(self.buffer.version)
            while not self.buffer.finished:
                start = time.monotonic()
                self.dispatch()
                self.collect()
                groups = self.take()
                trained = time.monotonic()
                probe = self.probe(groups)
                update = self.trainer.step(groups, self.buffer.version)
                self.buffer.advance()
                self.publish()
                now = time.monotonic()
                clock = Clock(now - start, self._waited, now - trained, self._sampled)
                bar.advance(1, self.record(groups, update, probe, clock))
                self.save()
        self.evaluate_after()

    def publish(self) -> None:
        """Give the workers the policy as it is; version 0 is the model folder that they loaded."""
        if self.buffer.version:
            self.fleet.publish(self.trainer.tensors(), self.buffer.version)

    def dispatch(self) -> None:
        """Hand out every group that may be sampled now, in jobs of a worker's share."""
        waiting = self.buffer.waiting()
        for start in range(0, len(waiting), self.plan.groups_per_job):
            sequences = tuple(waiting[start : start + self.plan.groups_per_job])
            requests = [request for n in sequences for request in self.stream.requests(n)]
            self.buffer.dispatch(sequences)
            self.fleet.submit(Job(sequences, tuple(requests)))

    def collect(self) -> None:
        """Take in finished jobs until the step at hand is complete."""
        self._waited = self._sampled = 0.0
        start = time.monotonic()
        while not self.buffer.step_ready():
            result = self.fleet.wait()
            if isinstance(result, Lost):
                self.requeue(result)
            else:
                self.score(result)
        self._waited = time.monotonic() - start

    def score(self, result: Generated) -> None:
        """Reward the completions of a job and put its groups into the buffer."""
        self._sampled += result.seconds
        samples = self.stream.samples
        for number, sequence in enumerate(result.job.sequences):
            completions = result.completions[number * samples : (number + 1) * samples]
            rewards = self.scorer.rewards(self.stream.prompt(sequence), completions)
            self.buffer.complete(sequence, completions, rewards)

    def requeue(self, lost: Lost) -> None:
        """Sample the groups of a dead worker again."""
        count = len(lost.job.sequences)
        _say(f"a rollout worker died ({lost.reason}); sampling {count} groups again")
        self.buffer.requeue(lost.job.sequences)
        self.progress.requeued += count
        self.dispatch()

    def take(self) -> list[ScoredGroup]:
        """The groups of the step, noted as trained."""
        groups: list[Group] = self.buffer.take()
        self.progress.groups.append([group.sequence for group in groups])
        return [
            ScoredGroup(self.stream.prompt(g.sequence).tokens, g.completions, g.rewards)
            for g in groups
        ]

    def probe(self, groups: Sequence[ScoredGroup]) -> Positions | None:
        """Acceptance on some of the step's own text, also where rollouts do not speculate."""
        texts = [
            Text((*g.prompt, *c.tokens), (0,) * len(g.prompt) + (1,) * len(c.tokens))
            for c_index in range(self.stream.samples)
            for g in groups
            for c in [g.completions[c_index]]
            if len(c.tokens) > 1
        ][: self.plan.probe_samples]
        if not texts:
            return None
        sampling = self.stream.sampling
        return measure_positions(
            self.trainer.backbone,
            self.head,
            texts,
            self.plan.probe_depths,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )

    def record(
        self,
        groups: Sequence[ScoredGroup],
        update: Update,
        probe: Positions | None,
        clock: Clock,
    ) -> str:
        """Log the step; returns a short note for the progress bar."""
        metrics = step_metrics(groups, update, probe, clock)
        self.progress.version = self.buffer.version
        self.progress.history.append(metrics)
        self.tracker.log(metrics, step=self.buffer.version)
        if alarm := check_spread([r for group in groups for r in group.rewards]):
            _say(f"step {self.buffer.version}: {alarm}")
        return f"reward {metrics['reward/mean']:.2f}, entropy {metrics['entropy/target']:.2f}"

    def save(self) -> None:
        """Write a checkpoint when one is due."""
        due = self.buffer.version % self.plan.checkpoint_every == 0
        if due or self.buffer.finished:
            self.checkpoints.save(self.progress, self.trainer.state())

    def evaluate_before(self) -> None:
        """Held-out reward of the untrained policy, unless an earlier process measured it."""
        if self.buffer.version == 0 and self.plan.eval_prompts:
            self.progress.before = {"reward/eval_before": self._evaluate()}

    def evaluate_after(self) -> None:
        """Held-out reward of the trained policy, on the same prompts with the same seeds."""
        if self.plan.eval_prompts:
            self.progress.after = {"reward/eval_after": self._evaluate()}

    def _evaluate(self) -> float:
        requests = [
            Request(
                id=f"eval/{number}",
                prompt=prompt.tokens,
                sampling=self.stream.sampling,
                seed=derived_seed(self.stream.seed, "eval", number),
            )
            for number, prompt in enumerate(self.plan.eval_prompts)
        ]
        completions = self.fleet.generate(Job((), tuple(requests)))
        scored = zip(self.plan.eval_prompts, completions, strict=True)
        rewards = [self.scorer.rewards(prompt, [c])[0] for prompt, c in scored]
        return sum(rewards) / len(rewards)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
