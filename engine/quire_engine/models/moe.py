"""Mixture of experts (Shazeer et al. 2017) as Mixtral and Qwen3-MoE have it: a router, and feed-forward parts of which
each token takes a few. Knows neither attention nor the batch's sequences.
"""

from dataclasses import replace

import torch

from quire_engine.models.config import DecoderConfig, MoEConfig
from quire_engine.models.layers import GatedMLP, Weights
from quire_engine.models.linear import Linear, make_linear
from quire_engine.models.ranks import SINGLE_RANK, Communicator, shard

# How published checkpoints call the block, and an expert's gate, up and down projections.
MOE_TENSOR_NAMES = {
    "MixtralForCausalLM": ("block_sparse_moe", ("w1", "w3", "w2")),
    "Qwen3MoeForCausalLM": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


class MoE:
    """A feed-forward part made of experts.

    ``router`` (hidden to count) and all the ``parts`` are of one dtype and device. Where ``ranks`` share the experts
    (expert parallelism, GShard, Lepikhin et al. 2020), ``parts`` are this one's: each rank knows all tokens and routes
    them in the same way, computes what its own experts make, and the ranks add that up.
    """

    def __init__(
        self, config: MoEConfig, router: Linear, parts: list[GatedMLP], ranks: Communicator = SINGLE_RANK
    ) -> None:
        self._config = config
        self._router = router
        self._experts = parts
        self._communicator = ranks
        self._own_experts = shard(config.num_experts, ranks)

    @classmethod
    def load(cls, config: DecoderConfig, experts: MoEConfig, weights: Weights, index: int) -> "MoE":
        """The part of layer ``index``, stored as published (an expert's projections are tensors of their own) or as
        transformers holds it (all experts' are one tensor).
        """
        layer, hidden = f"model.layers.{index}", config.hidden_size
        stacked = f"{layer}.mlp.experts.gate_up_proj" in weights.checkpoint
        block, projections = ("mlp", ()) if stacked else MOE_TENSOR_NAMES[config.architecture]
        gate = weights.load_fused([f"{layer}.{block}.gate.weight"], [(experts.num_experts, hidden)])
        unquantized = weights.options.config.model_copy(update={"quantization": None})
        router = make_linear(gate, None, replace(weights.options, config=unquantized))  # small, and it decides
        names = [
            [f"{layer}.{block}.experts.{each}.{name}" for name in projections] for each in range(experts.num_experts)
        ]
        weights.checkpoint.mark_used(f"{name}.weight" for each in names for name in each)
        parts = [
            _load_stacked_expert(weights, f"{layer}.{block}.experts", hidden, experts, each)
            if stacked
            else _load_expert(weights, names[each], hidden, experts)
            for each in range(experts.num_experts)[shard(experts.num_experts, weights.communicator)]
        ]
        return cls(experts, router, parts, weights.communicator)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """``states`` [T, hidden] -> [T, hidden].

        Tokens are put in the order of their experts, so that each expert computes all of its tokens at once. What the
        experts of a token made is added in the order of its choice, whatever else is in the batch.
        """
        weights, chosen = self._route(states)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self._config.num_experts).tolist()
        first = sum(counts[: self._own_experts.start])
        counts = counts[self._own_experts]
        order = order[first : first + sum(counts)]
        outputs = states[order // self._config.num_experts_per_tok]
        for part, rows in zip(self._experts, outputs.split(counts), strict=True):
            if len(rows):
                rows.copy_(part(rows))
        weighted = weights.new_zeros(chosen.numel(), states.shape[1])
        weighted[order] = outputs * weights.flatten()[order, None]
        return self._communicator.all_reduce(weighted.view(*chosen.shape, -1).sum(1).to(states.dtype))

    def _route(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids of the experts of each token, both [T, per_token], the heaviest first."""
        logits = self._router(states)
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(self._config.num_experts_per_tok, dim=-1)
        if self._config.norm_topk_prob:
            weights /= weights.sum(-1, keepdim=True)
        return weights.to(states.dtype) if self._config.round_weights else weights, chosen


def _load_expert(weights: Weights, names: list[str], hidden: int, experts: MoEConfig) -> GatedMLP:
    gate, up, down = names
    inner = experts.moe_intermediate_size
    gate_up = weights.linear([gate, up], [inner, inner], hidden, bias=False)
    return GatedMLP(gate_up, weights.linear([down], [hidden], inner, bias=False))


def _load_stacked_expert(weights: Weights, name: str, hidden: int, experts: MoEConfig, index: int) -> GatedMLP:
    count, inner = experts.num_experts, experts.moe_intermediate_size
    gate_up = weights.load_row(f"{name}.gate_up_proj", (count, 2 * inner, hidden), index)
    down = weights.load_row(f"{name}.down_proj", (count, hidden, inner), index)
    return GatedMLP(make_linear(gate_up, None, weights.options), make_linear(down, None, weights.options))
