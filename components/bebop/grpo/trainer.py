"""The trainer: one policy update from one step's groups.

Shape suffixes: K groups, S samples, N response tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bebop.errors import StageError
from bebop.grpo.logprobs import token_logprobs
from bebop.grpo.objective import Clip, PolicyLoss, group_advantages, policy_loss, token_mean
from bebop.grpo.packing import Sequences, micro_batches, pack
from bebop.models.backbone import Backbone
from bebop.rollout.engine import Completion, SamplingParams


@dataclass(frozen=True)
class TrainerSettings:
    """Everything that decides an update, apart from the data.

    Attributes:
        learning_rate: AdamW's.
        train_layers: last layers of the backbone that learn; 0 is all of them.
        clip: bounds of the importance ratio.
        divide_by_std: whether advantages are divided by their group's standard deviation.
        max_grad_norm: gradients are scaled down to this norm.
        micro_batch_tokens: padded tokens in one forward pass.
        sampling: how the behaviour policy sampled.
    """

    learning_rate: float
    train_layers: int
    clip: Clip
    divide_by_std: bool
    max_grad_norm: float
    micro_batch_tokens: int
    sampling: SamplingParams


@dataclass(frozen=True)
class ScoredGroup:
    """One prompt with its completions and their rewards."""

    prompt: tuple[int, ...]
    completions: Sequence[Completion]
    rewards: Sequence[float]

    @property
    def sequences(self) -> Sequences:
        """The tokens alone, as the forward pass takes them."""
        return Sequences(self.prompt, [c.tokens for c in self.completions])

    @property
    def token_count(self) -> int:
        """Response tokens of all samples."""
        return sum(len(c.tokens) for c in self.completions)


@dataclass(frozen=True)
class Update:
    """What one step did.

    Attributes:
        loss: objective over the step's kept tokens.
        grad_norm: before clipping; 0 when no group was kept.
        kept_groups: groups whose rewards differ; only they have a gradient.
        entropy_N: nats, of every token of the step, kept or not.
        ratio_N: importance ratio of every token.
        clipped_N: whether the ratio was clipped.
        staleness_N: versions between sampling and training.
    """

    loss: float
    grad_norm: float
    kept_groups: int
    entropy_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor
    staleness_N: Tensor


class Trainer:
    """Policy, optimiser and the step that joins them."""

    def __init__(self, backbone: Backbone, settings: TrainerSettings) -> None:
        self.backbone, self.settings = backbone, settings
        self.trained = select_parameters(backbone, settings.train_layers)
        for parameter in self.trained.values():
            parameter.requires_grad_(True)
        self.optimiser = torch.optim.AdamW(
            self.trained.values(), lr=settings.learning_rate, weight_decay=0.0
        )

    def step(self, groups: Sequence[ScoredGroup], version: int) -> Update:
        """Accumulate the gradient over the groups, clip it, update the policy.

        Args:
            groups: the step's groups, all with the same number of samples.
            version: of the policy before this update.

        Raises:
            StageError: the gradient is not finite.
        """
        rewards_KS = torch.tensor([list(group.rewards) for group in groups])
        advantages_KS, kept_K = group_advantages(
            rewards_KS, divide_by_std=self.settings.divide_by_std
        )
        kept = [k for k in range(len(groups)) if kept_K[k]]
        dropped = [k for k in range(len(groups)) if not kept_K[k]]
        denominator = sum(groups[k].token_count for k in kept)
        loss, parts = 0.0, []
        for indices in self._batches(groups, kept):
            batch = [groups[k] for k in indices]
            result, entropy_N = self._forward(batch, advantages_KS[indices])
            mean = token_mean(result.loss, denominator)
            mean.backward()
            loss += float(mean.detach())
            parts.append(_columns(batch, result, entropy_N, version))
        with torch.no_grad():
            for indices in self._batches(groups, dropped):
                batch = [groups[k] for k in indices]
                result, entropy_N = self._forward(batch, advantages_KS[indices])
                parts.append(_columns(batch, result, entropy_N, version))
        grad_norm = self._apply() if kept else 0.0
        columns = (torch.cat(column) for column in zip(*parts, strict=True))
        return Update(loss, grad_norm, len(kept), *columns)

    def _batches(self, groups: Sequence[ScoredGroup], chosen: list[int]) -> Iterator[list[int]]:
        sequences = [groups[k].sequences for k in chosen]
        for batch in micro_batches(sequences, self.settings.micro_batch_tokens):
            yield [chosen[i] for i in batch]

    def _forward(
        self, batch: Sequence[ScoredGroup], advantages_KS: Tensor
    ) -> tuple[PolicyLoss, Tensor]:
        """Per-token loss and entropy. Frozen lower layers keep nothing for the backward pass."""
        device = self.backbone.device
        packed = pack([group.sequences for group in batch]).to(device)
        hidden_BTH = self.backbone.hidden_states(
            packed.tokens_BT, positions=packed.positions_BT, mask=packed.mask_B1TT
        )
        source_NH = hidden_BTH.flatten(0, 1)[packed.source_N]
        logp_N, entropy_N = token_logprobs(
            self.backbone, source_NH, packed.target_N, self.settings.sampling
        )
        completions = [c for group in batch for c in group.completions]
        behaviour_N = torch.tensor([x for c in completions for x in c.logprobs], device=device)
        lengths = torch.tensor([len(c.tokens) for c in completions])
        advantage_N = advantages_KS.flatten().repeat_interleave(lengths).to(device)
        return policy_loss(logp_N, behaviour_N, advantage_N, self.settings.clip), entropy_N

    def _apply(self) -> float:
        parameters = list(self.trained.values())
        norm = float(nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm))
        if norm != norm or norm == float("inf"):
            raise StageError(
                "the policy's gradient is not finite",
                where="grpo",
                fix="Lower learning_rate; the last checkpoint is from before this step",
            )
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """The trained tensors by their name in the model."""
        return {name: parameter.detach() for name, parameter in self.trained.items()}

    def state(self) -> dict[str, Any]:
        """What a later process needs to go on with the very same bits."""
        return {
            "tensors": self.tensors(),
            "optimiser": self.optimiser.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the state that another process left."""
        assert state["tensors"].keys() == self.trained.keys()
        with torch.no_grad():
            for name, tensor in state["tensors"].items():
                self.trained[name].copy_(tensor)
        self.optimiser.load_state_dict(state["optimiser"])
        torch.set_rng_state(state["rng"])


def select_parameters(backbone: Backbone, train_layers: int) -> dict[str, nn.Parameter]:
    """Parameters of the last decoder layers, by their name in the model.

    Embedding, final norm and lm_head stay frozen: the head reads and writes through them.

    Raises:
        StageError: the backbone has fewer layers.
    """
    count = len(backbone.layers)
    if train_layers > count:
        raise StageError(
            f"train_layers is {train_layers}, the backbone has {count} layers",
            where="grpo.train_layers",
            fix=f"Use 1 to {count}, or 0 for all",
        )
    chosen = backbone.layers[count - train_layers :] if train_layers else backbone.layers
    members = {id(parameter) for layer in chosen for parameter in layer.parameters()}
    named = backbone.model.named_parameters()
    return {name: parameter for name, parameter in named if id(parameter) in members}


def _columns(
    batch: Sequence[ScoredGroup], result: PolicyLoss, entropy_N: Tensor, version: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    versions = [v for group in batch for c in group.completions for v in c.versions]
    staleness_N = version - torch.tensor(versions)
    return entropy_N.cpu(), result.ratio.cpu(), result.clipped.cpu(), staleness_N
