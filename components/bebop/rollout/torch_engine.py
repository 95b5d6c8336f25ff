"""The embedded engine: requests, stop rules and weights around `decoding.loop.Decoder`."""

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from bebop.decoding.loop import Admission, Decoder, Emission
from bebop.decoding.slots import Filters
from bebop.errors import InputError
from bebop.models.backbone import Backbone
from bebop.models.checkpoint import check_head
from bebop.models.mtp_head import MTPHead
from bebop.rollout.engine import Completion, EngineStats, Request, Selector, Speculation
from bebop.rollout.weights import check_tensors, copy_tensors, draft_tensors, target_tensors

NO_SPECULATION = Speculation()
StaleCache = Literal["recompute", "keep"]


@dataclass
class _Running:
    request: Request
    completion: Completion


class TorchEngine:
    """Generates with torch in this process, with or without a head that drafts.

    Args:
        backbone: the policy; the engine reads its parameters and `load_weights` writes them.
        head: needed for speculation.
        speculation: mode, gamma, and the number of active requests above which it is off.
        max_batch: most requests decoded at once; the others wait.
        max_length: most tokens of a prompt and its completion together.
        stale_cache: what `load_weights` does with the states of requests in flight: "recompute"
            them under the new weights, or "keep" them (faster; tokens then come from a mixture).
    """

    def __init__(
        self,
        backbone: Backbone,
        head: MTPHead | None = None,
        *,
        speculation: Speculation = NO_SPECULATION,
        max_batch: int = 32,
        max_length: int = 2048,
        stale_cache: StaleCache = "recompute",
    ) -> None:
        if speculation.mode != "off" and head is None:
            raise InputError(
                f"speculation {speculation.mode!r} needs a head",
                where="TorchEngine",
                fix='Load a model that has one, or use Speculation(mode="off")',
            )
        if head is not None:
            check_head(head, "TorchEngine")
        limit = getattr(backbone.config, "max_position_embeddings", max_length)
        self.backbone, self.head, self.speculation = backbone, head, speculation
        self.max_length, self.stale_cache = min(max_length, limit), stale_cache
        self._decoder = Decoder(backbone, head, slots=max_batch)
        self._waiting: deque[Request] = deque()
        self._running: list[_Running] = []
        self._ids: set[str] = set()
        depths = speculation.depth(1)
        self._stats = EngineStats(proposed=[0] * depths, accepted=[0] * depths)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests.

        Raises:
            InputError: a prompt that is empty, too long or outside the vocabulary, or an id
                that is already in use; then none of them is queued.
        """
        seen: set[str] = set()
        for request in requests:
            self._check(request, seen)
            seen.add(request.id)
        self._ids |= seen
        self._waiting.extend(requests)

    def _check(self, request: Request, seen: set[str]) -> None:
        prompt, room = request.prompt, self.max_length - request.sampling.max_tokens
        vocabulary = self.backbone.token_count
        if request.id in self._ids or request.id in seen:
            what, fix = "the id is in use", "Give every unfinished request its own id"
        elif not prompt:
            what, fix = "the prompt is empty", "Give at least one token"
        elif len(prompt) > room:
            what = f"{len(prompt)} prompt tokens + {request.sampling.max_tokens} new ones"
            fix = f"The engine's max_length is {self.max_length}"
        elif min(prompt) < 0 or max(prompt) >= vocabulary:
            what, fix = "a token is outside the vocabulary", f"Tokens are 0 to {vocabulary - 1}"
        else:
            return
        raise InputError(what, where=f"request {request.id!r}", fix=fix)

    def step(self) -> list[Completion]:
        """Let waiting requests in, run one round, return what finished."""
        done = self._admit()
        if self._running:
            gamma = self.speculation.depth(len(self._running))
            emission = self._decoder.round(gamma, greedy=self.speculation.mode == "target_only")
            self._stats.rounds += 1
            self._stats.plain_rounds += gamma == 0
            self._stats.request_rounds += len(self._running)
            for running in self._running:
                running.completion.rounds += 1
            done += self._take(emission, 0)
        return done

    def _admit(self) -> list[Completion]:
        room = min(self._decoder.capacity - self._decoder.active, len(self._waiting))
        if room == 0:
            return []
        requests = [self._waiting.popleft() for _ in range(room)]
        admissions = [Admission(r.prompt, r.seed, _filters(r)) for r in requests]
        with_head = self.speculation.depth(self._decoder.active + room) > 0
        first = len(self._running)
        order, emission = self._decoder.admit(admissions, with_head=with_head)
        depths = self.speculation.depth(1)
        for index in order:
            completion = Completion(
                requests[index].id, proposed=[0] * depths, accepted=[0] * depths
            )
            self._running.append(_Running(requests[index], completion))
        return self._take(emission, first)

    def _take(self, emission: Emission, first: int) -> list[Completion]:
        """Give slots first, first+1, … their new tokens; release those that ended."""
        ended = []
        news = zip(emission.tokens, emission.logprobs, strict=True)
        for slot, (tokens, logprobs) in enumerate(news, start=first):
            if self._append(self._running[slot], tokens, logprobs, emission.drafts):
                ended.append(slot)
        done = [self._running[slot].completion for slot in ended]
        # From the back, so that the request moved into a freed slot is never one that ended.
        for slot in reversed(ended):
            last = self._decoder.release(slot)
            self._running[slot] = self._running[last]
            self._running.pop()
        self._ids -= {completion.id for completion in done}
        self._stats.finished += len(done)
        return done

    def _append(
        self, running: _Running, tokens: list[int], logprobs: list[float], drafts: int
    ) -> bool:
        """Take tokens up to a stop token or the limit; True when the completion ended."""
        completion, sampling = running.completion, running.request.sampling
        for depth, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            if depth < drafts:
                self._count(completion, depth, accepted=depth < len(tokens) - 1)
            completion.tokens.append(token)
            completion.logprobs.append(logprob)
            completion.versions.append(self._stats.version)
            self._stats.tokens += 1
            if token in sampling.stop_token_ids:
                completion.finish_reason = "stop"
                return True
            if len(completion.tokens) == sampling.max_tokens:
                completion.finish_reason = "length"
                return True
        return False

    def _count(self, completion: Completion, depth: int, *, accepted: bool) -> None:
        for counts in (completion, self._stats):
            counts.proposed[depth] += 1
            counts.accepted[depth] += accepted

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete `requests`, in their order; the engine must be idle.

        Raises:
            InputError: other requests are queued or active (use `submit` and `step`).
        """
        if self._ids:
            raise InputError(
                f"{len(self._ids)} requests are unfinished",
                where="TorchEngine.generate",
                fix="Use submit and step, or abort first",
            )
        self.submit(requests)
        done: dict[str, Completion] = {}
        while self._ids:
            done |= {completion.id: completion for completion in self.step()}
        return [done[request.id] for request in requests]

    def abort(self) -> list[Completion]:
        """Drop everything queued or active; return what was generated, queued ones empty."""
        partial = [running.completion for running in self._running]
        partial += [Completion(request.id) for request in self._waiting]
        for completion in partial:
            completion.finish_reason = "abort"
        while self._decoder.active:
            self._decoder.release(self._decoder.active - 1)
        self._running.clear()
        self._waiting.clear()
        self._ids.clear()
        return partial

    def load_weights(
        self, tensors: Mapping[str, Tensor], version: int, selector: Selector = "target"
    ) -> None:
        """Copy weights in; tokens sampled from now on carry `version`.

        Nothing is copied unless every name, shape and value passes. Tensors that are not given
        keep their values, so a trainer may send only the layers it trains.

        Args:
            tensors: backbone names as in `model.named_parameters()`, head names as in
                `checkpoint.head_tensors` ("mtp.…").
            version: at least the current one.
            selector: which side may be written; "target" leaves the head untouched.

        Raises:
            InputError: an unknown name or one the selector excludes, another shape, values that
                are not finite, no tensor at all, or a version that goes back.
        """
        if version < self._stats.version:
            raise InputError(
                f"version {version} is older than {self._stats.version}",
                where="load_weights",
                fix="Versions only grow; make a new engine to start over",
            )
        writable: dict[str, Tensor] = {}
        if selector in ("target", "all"):
            writable |= target_tensors(self.backbone)
        if selector in ("draft", "all"):
            writable |= draft_tensors(self.head)
        check_tensors(tensors, writable, selector)
        copy_tensors(tensors, writable)
        self._stats.version = version
        if selector != "draft" and self.stale_cache == "recompute":
            self._decoder.recompute()
        elif selector != "draft":
            self._decoder.forget_prompts()
        if selector != "target":
            self._decoder.forget_head()

    def stats(self) -> EngineStats:
        """Counters since the engine was made; a copy, so that two can be subtracted."""
        self._stats.prompt_tokens = self._decoder.prompt_tokens
        self._stats.seconds = self._decoder.seconds
        return copy.deepcopy(self._stats)

    def close(self) -> None:
        """Free caches; the engine cannot generate afterwards."""
        self.abort()
        self._decoder = Decoder(self.backbone, self.head, slots=0)


def _filters(request: Request) -> Filters:
    sampling = request.sampling
    return Filters(sampling.temperature, sampling.top_k, sampling.top_p)
