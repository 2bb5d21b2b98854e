"""Mixture of experts (Shazeer et al. 2017) as Mixtral and Qwen3-MoE have it: a router, and feed-forward parts of which
each token takes a few. Knows neither attention nor the batch's sequences.
"""

from dataclasses import replace

import torch

from quire_engine.models.config import DecoderConfig, ExpertsConfig
from quire_engine.models.layers import FeedForward, Weights
from quire_engine.models.linear import Linear, make_linear
from quire_engine.models.ranks import ALONE, Ranks, share

# How published checkpoints call the block, and an expert's gate, up and down projections.
NAMES = {
    "MixtralForCausalLM": ("block_sparse_moe", ("w1", "w3", "w2")),
    "Qwen3MoeForCausalLM": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


class SparseFeedForward:
    """A feed-forward part made of experts.

    ``router`` (hidden to count) and all the ``parts`` are of one dtype and device. Where ``ranks`` share the experts
    (expert parallelism, GShard, Lepikhin et al. 2020), ``parts`` are this one's: each rank knows all tokens and routes
    them in the same way, computes what its own experts make, and the ranks add that up.
    """

    def __init__(self, config: ExpertsConfig, router: Linear, parts: list[FeedForward], ranks: Ranks = ALONE) -> None:
        self._config = config
        self._router = router
        self._parts = parts
        self._ranks = ranks
        self._own = share(config.count, ranks)

    @classmethod
    def read(cls, config: DecoderConfig, experts: ExpertsConfig, weights: Weights, index: int) -> "SparseFeedForward":
        """The part of layer ``index``, stored as published (an expert's projections are tensors of their own) or as
        transformers holds it (all experts' are one tensor).
        """
        layer, hidden = f"model.layers.{index}", config.hidden_size
        stacked = f"{layer}.mlp.experts.gate_up_proj" in weights.checkpoint
        block, projections = ("mlp", ()) if stacked else NAMES[config.architecture]
        gate = weights.fused([f"{layer}.{block}.gate.weight"], [(experts.count, hidden)])
        plain = weights.options.config.model_copy(update={"quantization": None})
        router = make_linear(gate, None, replace(weights.options, config=plain))  # small, and it decides
        names = [[f"{layer}.{block}.experts.{each}.{name}" for name in projections] for each in range(experts.count)]
        weights.checkpoint.leave(f"{name}.weight" for each in names for name in each)
        parts = [
            _stacked_part(weights, f"{layer}.{block}.experts", hidden, experts, each)
            if stacked
            else _part(weights, names[each], hidden, experts)
            for each in range(experts.count)[share(experts.count, weights.ranks)]
        ]
        return cls(experts, router, parts, weights.ranks)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """``states`` [T, hidden] -> [T, hidden].

        Tokens are put in the order of their experts, so that each expert computes all of its tokens at once. What the
        experts of a token made is added in the order of its choice, whatever else is in the batch.
        """
        weights, chosen = self._route(states)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self._config.count).tolist()
        first = sum(counts[: self._own.start])
        counts = counts[self._own]
        order = order[first : first + sum(counts)]
        outputs = states[order // self._config.per_token]
        for part, rows in zip(self._parts, outputs.split(counts), strict=True):
            if len(rows):
                rows.copy_(part(rows))
        weighted = weights.new_zeros(chosen.numel(), states.shape[1])
        weighted[order] = outputs * weights.flatten()[order, None]
        return self._ranks.sum(weighted.view(*chosen.shape, -1).sum(1).to(states.dtype))

    def _route(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids of the experts of each token, both [T, per_token], the heaviest first."""
        logits = self._router(states)
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(self._config.per_token, dim=-1)
        if self._config.normalized:
            weights /= weights.sum(-1, keepdim=True)
        return weights.to(states.dtype) if self._config.rounded else weights, chosen


def _part(weights: Weights, names: list[str], hidden: int, experts: ExpertsConfig) -> FeedForward:
    gate, up, down = names
    inner = experts.ffn_size
    gate_up = weights.linear([gate, up], [inner, inner], hidden, bias=False)
    return FeedForward(gate_up, weights.linear([down], [hidden], inner, bias=False))


def _stacked_part(weights: Weights, name: str, hidden: int, experts: ExpertsConfig, index: int) -> FeedForward:
    count, inner = experts.count, experts.ffn_size
    gate_up = weights.one_of(f"{name}.gate_up_proj", (count, 2 * inner, hidden), index)
    down = weights.one_of(f"{name}.down_proj", (count, hidden, inner), index)
    return FeedForward(make_linear(gate_up, None, weights.options), make_linear(down, None, weights.options))
