"""The multi-token-prediction head: one decoder layer that drafts for the backbone.

Row t of the trunk (its state after the final norm) and the embedding of token t + 1 give a state
from which the backbone's own lm_head predicts token t + 2; fed with its own output state, the
same layer predicts token t + 3, and so on. Shape of Qwen3-Next, with plain RMSNorm.

Shape suffixes: B rows, T tokens, H hidden, G depths, V vocabulary, S keys.
"""

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from bebop.models.backbone import Backbone

_RESIDUAL_OUTPUTS = ("o_proj", "down_proj")


class MTPHead(nn.Module):
    """`norm(layer(fc([norm_e(embed), norm_h(hidden)])))`.

    The embedding and the lm_head stay the backbone's: they are no parameters of this module. Its
    key/value cache is its own, one entry a trunk row, at the trunk row's position.
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        config, size = backbone.config, backbone.hidden_size
        eps = getattr(config, "rms_norm_eps", 1e-6)
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([type(backbone.layers[-1])(config, layer_idx=0)])
        self.norm = nn.RMSNorm(size, eps=eps)
        self.rotary_emb = type(backbone.trunk.rotary_emb)(config=config)
        self.to(device=backbone.device, dtype=backbone.dtype)

    def features(self, embeds_BTH: Tensor, hidden_BTH: Tensor) -> Tensor:
        """Input of the fc, [B, T, 2H], embedding half first."""
        normed = (self.pre_fc_norm_embedding(embeds_BTH), self.pre_fc_norm_hidden(hidden_BTH))
        return torch.cat(normed, dim=-1)

    def forward(
        self,
        embeds_BTH: Tensor,
        hidden_BTH: Tensor,
        *,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """One depth.

        Args:
            embeds_BTH: embeddings of the tokens that follow each row's state.
            hidden_BTH: trunk states (depth 1) or this function's own output (deeper).
            positions: [B, T] rotary positions of the rows.
            mask: [B, 1, T, S] boolean, True where a row may look; None is causal.
            cache: the layer's keys and values are added to it.

        Returns:
            [B, T, H] state that the lm_head reads and the next depth takes.
        """
        x_BTH = self.fc(self.features(embeds_BTH, hidden_BTH))
        output = self.layers[0](
            x_BTH,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rotary_emb(x_BTH, positions),
            cache=cache,
            use_cache=cache is not None,
        )
        return self.norm(output[0] if isinstance(output, tuple) else output)


def new_head(backbone: Backbone) -> MTPHead:
    """A head that passes on what its fc makes, with a layer ready to learn.

    The layer is a copy of the backbone's last one with the outputs of both residual branches
    zeroed, so that it starts as the identity; the final norm is the backbone's; the fc passes the
    trunk state through. `ridge.ridge_fit` then gives the fc its closed-form start.
    """
    head = MTPHead(backbone)
    with torch.no_grad():
        head.layers[0].load_state_dict(backbone.layers[-1].state_dict())
        for name, parameter in head.layers[0].named_parameters():
            if any(part in _RESIDUAL_OUTPUTS for part in name.split(".")):
                parameter.zero_()
        head.norm.weight.copy_(backbone.final_norm.weight)
        size = backbone.hidden_size
        head.fc.weight.zero_()
        head.fc.weight[:, size:].copy_(torch.eye(size))
    return head.requires_grad_(True)


def draft_hidden(
    head: MTPHead,
    backbone: Backbone,
    tokens_BT: Tensor,
    hidden_BTH: Tensor,
    depths: int,
    *,
    row_mask: Tensor | None = None,
) -> Tensor:
    """The head's states at every depth for every row, computed as decoding computes them.

    At depth i, row t is fed its own state of depth i - 1 and the embedding of token t + i, sits
    at position t + i - 1, and attends to the depth-1 keys of rows s <= t and to its own chain's
    keys of depths 2 to i: what a decoder has cached when it drafts from row t. Its output predicts
    token t + i + 1, whose target is the backbone's row t + i.

    Gradients run through the whole chain of depths and stop at the backbone, whose states and
    embeddings are detached.

    Args:
        tokens_BT: right-padded token ids.
        hidden_BTH: trunk states after the final norm.
        depths: number of depths G.
        row_mask: [B, T] True at real rows; other rows are hidden from real ones. Needed only
            where padding precedes a real row.

    Returns:
        [G, B, T, H]; at depth i the last i rows have no next token and hold values to be masked.
    """
    rows = tokens_BT.shape[1]
    depth_mask_BTT, chain_TT = _draft_masks(rows, row_mask, hidden_BTH.device)
    positions_1T = torch.arange(rows, device=hidden_BTH.device)[None]
    cache = DynamicCache()
    state_BTH, states = hidden_BTH.detach(), []
    for depth in range(1, depths + 1):
        embeds_BTH = backbone.embed(_shift_left(tokens_BT, depth)).detach()
        own = [chain_TT.expand(*depth_mask_BTT.shape[:-1], rows)] * (depth - 1)
        state_BTH = head(
            embeds_BTH,
            state_BTH,
            positions=positions_1T + depth - 1,
            mask=torch.cat([depth_mask_BTT, *own], dim=-1),
            cache=cache,
        )
        states.append(state_BTH)
    return torch.stack(states)


def _draft_masks(rows: int, row_mask: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Depth-1 part [B or 1, 1, T, T] and the same-chain part [T, T] of the attention mask."""
    chain_TT = torch.eye(rows, dtype=torch.bool, device=device)
    causal_BTT = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()[None, None]
    if row_mask is not None:
        # A hidden row still sees itself: a softmax over nothing is NaN.
        causal_BTT = (causal_BTT & row_mask.bool()[:, None, None, :]) | chain_TT
    return causal_BTT, chain_TT


def _shift_left(tokens_BT: Tensor, by: int) -> Tensor:
    """Row t gets token t + by; rows without one get token 0."""
    return nn.functional.pad(tokens_BT[:, by:], (0, min(by, tokens_BT.shape[1])))
