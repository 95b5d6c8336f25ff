"""The protocol between whoever wants text and whatever generates it.

An engine takes requests, works in rounds (one draft and one verification for every active
request) and hands out completions. Rollout actors, the diagnosis and the throughput stage speak
this protocol only, so that a new engine is one file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from bebop.errors import InputError

Mode = Literal["off", "target_only", "rejection"]
FinishReason = Literal["stop", "length", "abort"]
Selector = Literal["target", "draft", "all"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled; the filters apply in the order temperature, top-k, top-p.

    Attributes:
        temperature: softmax temperature; 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest likeliest set with at least this mass; 1 keeps all.
        max_tokens: most tokens to generate.
        stop_token_ids: tokens that end the completion; the stop token itself is kept.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (0.0 <= self.temperature < float("inf")):
            raise InputError(
                f"temperature {self.temperature} is not a number of at least 0",
                where="SamplingParams.temperature",
                fix="Use 0 for greedy, 1 for the model's own distribution",
            )
        if self.top_k < 0 or not (0.0 < self.top_p <= 1.0):
            raise InputError(
                f"top_k {self.top_k}, top_p {self.top_p} are out of range",
                where="SamplingParams",
                fix="top_k is at least 0 (0 is off), top_p is in (0, 1] (1 is off)",
            )
        if self.max_tokens < 1:
            raise InputError(
                f"max_tokens {self.max_tokens} is below 1",
                where="SamplingParams.max_tokens",
                fix="Ask for at least one token",
            )

    @property
    def filtered(self) -> bool:
        """Whether top-k or top-p can remove a token."""
        return self.top_k > 0 or self.top_p < 1.0


@dataclass(frozen=True)
class Request:
    """One prompt to complete. Its seed alone decides its random numbers, whatever its batch."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int


@dataclass
class Completion:
    """What became of one request.

    Attributes:
        id: the request's id.
        tokens: generated tokens, the stop token included.
        logprobs: log p of each token under the distribution it was sampled from (the target, at
            the request's temperature and filters).
        versions: version of the policy weights that sampled each token.
        rounds: forward passes of the target spent on this request after its prompt.
        proposed: proposed[i] counts the drafts that were put to the test at depth i + 1, i.e.
            every earlier draft of their round was accepted and the completion had not ended.
        accepted: drafts accepted at depth i + 1, so that accepted[i] / proposed[i] is the
            conditional acceptance alpha_{i+1} (see `alphas`).
        finish_reason: "stop" (a stop token), "length" (max_tokens) or "abort".
    """

    id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rounds: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"


@dataclass(frozen=True)
class Speculation:
    """Whether and how drafts are made.

    Attributes:
        mode: "off", "target_only" (greedy drafts) or "rejection" (sampled drafts).
        gamma: drafts a round.
        max_batch: above this many active requests decode plainly; 0 means no limit.
    """

    mode: Mode = "off"
    gamma: int = 3
    max_batch: int = 0

    def __post_init__(self) -> None:
        if self.mode not in ("off", "target_only", "rejection"):
            raise InputError(
                f"unknown speculation mode {self.mode!r}",
                where="Speculation.mode",
                fix='Use "off", "target_only" or "rejection"',
            )
        if self.gamma < 0 or self.max_batch < 0:
            raise InputError(
                f"gamma {self.gamma} and max_batch {self.max_batch} must be at least 0",
                where="Speculation",
                fix="gamma 0 is plain decoding, max_batch 0 is no limit",
            )

    def depth(self, active: int) -> int:
        """Drafts a round for `active` requests."""
        if self.mode == "off" or (self.max_batch and active > self.max_batch):
            return 0
        return self.gamma


@dataclass
class EngineStats:
    """Counters since the engine was made (or since `reset`).

    Attributes:
        tokens: tokens emitted.
        prompt_tokens: prompt tokens prefilled (a shared prompt counts once).
        rounds: batched rounds run.
        request_rounds: rounds summed over the requests that were active in them.
        plain_rounds: batched rounds run without drafts.
        proposed, accepted: per depth, as in `Completion`.
        finished: completions handed out.
        version: version of the target weights in use.
        seconds: time spent in `step`, by part (prefill, draft, verify, sample, …).
    """

    tokens: int = 0
    prompt_tokens: int = 0
    rounds: int = 0
    request_rounds: int = 0
    plain_rounds: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finished: int = 0
    version: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def alphas(self) -> list[float]:
        """Conditional acceptance per depth."""
        return alphas(self.proposed, self.accepted)


def alphas(proposed: Sequence[int], accepted: Sequence[int]) -> list[float]:
    """Conditional acceptance per depth; 0 at a depth that was never tested.

    Their running product is the cumulative acceptance, the sum of that is E[L].
    """
    return [a / p if p else 0.0 for a, p in zip(accepted, proposed, strict=True)]


@runtime_checkable
class Engine(Protocol):
    """What an engine does. `step` is one round for every active request."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; ids must be unique among those not yet finished."""

    def step(self) -> list[Completion]:
        """Run one round and return the requests that finished in it."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Submit, step until these are done, return them in request order."""

    def abort(self) -> list[Completion]:
        """Drop everything queued or active and return the partial results."""

    def load_weights(
        self, tensors: Mapping[str, Tensor], version: int, selector: Selector = "target"
    ) -> None:
        """Replace weights; tokens sampled from now on carry `version`."""

    def stats(self) -> EngineStats:
        """Counters so far."""

    def close(self) -> None:
        """Free the engine's memory; it cannot be used afterwards."""
