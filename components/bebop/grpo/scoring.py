"""Rewards of completions: decode the tokens, ask the task's verifier."""

from collections.abc import Sequence
from typing import Any

from bebop.dataset import Prompt
from bebop.rewards.registry import Verifier, self_test, verifier
from bebop.rollout.engine import Completion


class Scorer:
    """Verifiers of every task among the prompts, proved on the prompts before first use.

    Args:
        tokenizer: of the policy.
        prompts: each prompt's gold answer must score 1 and an empty one 0.

    Raises:
        StageError: a verifier does not pay as it should.
    """

    def __init__(self, tokenizer: Any, prompts: Sequence[Prompt]) -> None:
        self.tokenizer = tokenizer
        self_test([vars(prompt) for prompt in prompts])
        self._verifiers: dict[str, Verifier] = {}

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """One reward a completion, in order."""
        if prompt.task not in self._verifiers:
            self._verifiers[prompt.task] = verifier(prompt.task)
        checker = self._verifiers[prompt.task]
        return [checker.score(self.text(c.tokens), prompt.entry) for c in completions]

    def text(self, tokens: Sequence[int]) -> str:
        """A response as its verifier reads it."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    @property
    def errors(self) -> int:
        """Verifier exceptions so far, each counted as reward 0."""
        return sum(sum(checker.errors.values()) for checker in self._verifiers.values())
