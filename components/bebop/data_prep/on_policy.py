"""Text that the backbone itself writes, at the settings at which rollouts will sample.

A draft head must predict what the policy says during reinforcement learning, not what a curated
answer says, so its training text is sampled here and scored by the task's verifier.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bebop.data_prep.rows import Question
from bebop.progress import Progress
from bebop.rewards.registry import Verifier, verifier

if TYPE_CHECKING:
    from bebop.models.backbone import Backbone
    from bebop.rollout.engine import Completion, Engine, Request, SamplingParams


@dataclass(frozen=True)
class Prompt:
    """A question and its tokens, up to where the assistant starts to speak."""

    question: Question
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Response:
    """One sampled response.

    Attributes:
        prompt: what it answers.
        tokens: the response, its stop token included.
        logprobs: log p of each token at the sampling settings (nats).
        finished: whether it ended by itself, not at `max_tokens`.
        text: decoded, without special tokens.
        reward: 0.0 or 1.0.
    """

    prompt: Prompt
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool
    text: str
    reward: float

    @property
    def entropy(self) -> float:
        """Mean of -log p over the response (nats per token).

        Its expectation over responses is the mean entropy of the sampled distributions, so it is
        an unbiased estimate that costs no further pass. Over single responses it spreads more
        widely than the entropy itself.
        """
        return -sum(self.logprobs) / len(self.logprobs)


def stop_tokens(backbone: "Backbone") -> tuple[int, ...]:
    """Every token that ends a response, by the tokenizer and by the model's configs."""
    found: set[int] = set()
    configs = (backbone.tokenizer, backbone.config, backbone.model.generation_config)
    for holder in configs:
        value: Any = getattr(holder, "eos_token_id", None)
        found.update(value if isinstance(value, list) else [value])
    return tuple(sorted(token for token in found if token is not None))


def sample_responses(
    backbone: "Backbone",
    prompts: Sequence[Prompt],
    sampling: "SamplingParams",
    *,
    samples: int,
    max_batch: int,
    seed: int,
    description: str = "sample responses",
) -> list[Response]:
    """Sample and score `samples` responses to each prompt, in prompt order.

    Args:
        backbone: model and tokenizer.
        prompts: at least one.
        sampling: temperature, filters, length and stop tokens of the rollouts.
        samples: responses a prompt.
        max_batch: requests decoded together.
        seed: with prompt and sample number it decides a response, whatever the batch.
        description: of the progress bar.
    """
    from bebop.rollout.engine import Request
    from bebop.rollout.torch_engine import TorchEngine

    requests = [
        Request(
            f"{p.question.prompt_id}/{n}",
            p.tokens,
            sampling,
            request_seed(seed, p.question.prompt_id, n),
        )
        for p in prompts
        for n in range(samples)
    ]
    longest = max(len(prompt.tokens) for prompt in prompts) + sampling.max_tokens
    engine = TorchEngine(backbone, max_batch=min(max_batch, len(requests)), max_length=longest)
    try:
        completions = run_requests(engine, requests, description)
    finally:
        engine.close()
    by_prompt = {prompt.question.prompt_id: prompt for prompt in prompts}
    verifiers = {task: verifier(task) for task in {p.question.task for p in prompts}}
    return [
        make_response(by_prompt[request.id.split("/")[0]], completion, backbone, verifiers)
        for request, completion in zip(requests, completions, strict=True)
    ]


def run_requests(
    engine: "Engine", requests: Sequence["Request"], description: str
) -> list["Completion"]:
    """The completions in request order, with a progress bar."""
    done: dict[str, Completion] = {}
    engine.submit(requests)
    with Progress(description, len(requests)) as progress:
        while len(done) < len(requests):
            finished = engine.step()
            done.update((completion.id, completion) for completion in finished)
            tokens = engine.stats().tokens
            progress.advance(len(finished), f"{tokens} tokens")
    return [done[request.id] for request in requests]


def make_response(
    prompt: Prompt, completion: "Completion", backbone: "Backbone", verifiers: dict[str, Verifier]
) -> Response:
    """Decode and score a completion."""
    text = backbone.tokenizer.decode(completion.tokens, skip_special_tokens=True)
    assert len(completion.tokens) == len(completion.logprobs) > 0
    return Response(
        prompt=prompt,
        tokens=tuple(completion.tokens),
        logprobs=tuple(completion.logprobs),
        finished=completion.finish_reason == "stop",
        text=text,
        reward=verifiers[prompt.question.task].score(text, prompt.question.entry),
    )


def request_seed(seed: int, prompt_id: str, number: int) -> int:
    """A 63-bit seed that differs for every request."""
    digest = hashlib.sha256(f"{seed}\0{prompt_id}\0{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
