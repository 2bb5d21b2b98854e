"""The feed-forward networks of a decoder layer: ``GatedMLP``, and ``MoE``, a mixture of them."""

from dataclasses import dataclass

import torch

from quire_engine.checkpoint.config import DecoderConfig, MoEConfig
from quire_engine.distributed.communicator import SINGLE_RANK, Communicator, shard
from quire_engine.layers.weight_loader import WeightLoader
from quire_engine.quantization.base import Linear

# The names that published checkpoints give the block, and an expert's gate, up and down projections.
MOE_TENSOR_NAMES = {
    "MixtralForCausalLM": ("block_sparse_moe", ("w1", "w3", "w2")),
    "Qwen3MoeForCausalLM": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """The gated feed-forward network (SwiGLU, Shazeer 2020), with gate and up projections fused."""

    gate_up_proj: Linear
    down_proj: Linear

    @classmethod
    def load(cls, weights: WeightLoader, name: str, hidden: int, inner: int, *, bias: bool) -> "GatedMLP":
        """Loads the tensors under ``name``: ``hidden`` inputs and outputs, and an intermediate size of ``inner``, of
        which each rank has a shard.
        """
        inputs = [f"{name}.gate_proj", f"{name}.up_proj"]
        gate_up = weights.column_parallel_linear(inputs, [inner, inner], hidden, bias=bias)
        return cls(gate_up, weights.row_parallel_linear(f"{name}.down_proj", hidden, inner, bias=bias))

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """``states`` [T, hidden] -> [T, hidden]."""
        return self.down_proj(self.gate_up_proj.forward_silu_mul(states))


class MoE:
    """A mixture of experts (Shazeer et al. 2017) as Mixtral and Qwen3-MoE have it: a router sends each token to a few
    of the experts, each of which is a ``GatedMLP``.

    ``router`` (hidden to number of experts) and all ``experts`` are of one dtype and device. Where ranks share the
    experts (expert parallelism, GShard, Lepikhin et al. 2020), ``experts`` are this rank's: each rank sees all tokens
    and routes them in the same way, computes the outputs of its own experts, and the ranks sum them.
    """

    def __init__(
        self, config: MoEConfig, router: Linear, experts: list[GatedMLP], communicator: Communicator = SINGLE_RANK
    ) -> None:
        self._config = config
        self._router = router
        self._experts = experts
        self._communicator = communicator
        self._own_experts = shard(config.num_experts, communicator)

    @classmethod
    def load(cls, config: DecoderConfig, experts: MoEConfig, weights: WeightLoader, index: int) -> "MoE":
        """Loads layer ``index``, stored as published (each projection of an expert is a tensor of its own) or as
        transformers writes it (one tensor for all experts).
        """
        layer, hidden = f"model.layers.{index}", config.hidden_size
        stacked = f"{layer}.mlp.experts.gate_up_proj" in weights.checkpoint
        block, projections = ("mlp", ()) if stacked else MOE_TENSOR_NAMES[config.architecture]
        router = weights.router(f"{layer}.{block}.gate", experts.num_experts, hidden)
        names = [
            [f"{layer}.{block}.experts.{each}.{name}" for name in projections] for each in range(experts.num_experts)
        ]
        tensor_names = weights.quantization.linear.tensor_names
        weights.checkpoint.mark_used(tensor for each in names for name in each for tensor in tensor_names(name))
        parts = [
            _load_stacked_expert(weights, f"{layer}.{block}.experts", hidden, experts, each)
            if stacked
            else _load_expert(weights, names[each], hidden, experts)
            for each in range(experts.num_experts)[shard(experts.num_experts, weights.communicator)]
        ]
        return cls(experts, router, parts, weights.communicator)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """``states`` [T, hidden] -> [T, hidden].

        Tokens are sorted by expert, so that each expert computes all of its tokens at once. The outputs of a token's
        experts are summed in the order of the router's choice, whatever else is in the batch.
        """
        weights, chosen = self._route(states)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self._config.num_experts).tolist()
        first = sum(counts[: self._own_experts.start])
        counts = counts[self._own_experts]
        order = order[first : first + sum(counts)]
        outputs = states[order // self._config.num_experts_per_tok]
        for expert, rows in zip(self._experts, outputs.split(counts), strict=True):
            if len(rows):
                rows.copy_(expert(rows))
        weighted = weights.new_zeros(chosen.numel(), states.shape[1])
        weighted[order] = outputs * weights.flatten()[order, None]
        return self._communicator.all_reduce(weighted.view(*chosen.shape, -1).sum(1).to(states.dtype))

    def _route(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids of each token's experts, both [T, num_experts_per_tok], by descending weight."""
        logits = self._router(states)
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(self._config.num_experts_per_tok, dim=-1)
        if self._config.norm_topk_prob:
            weights /= weights.sum(-1, keepdim=True)
        return weights.to(states.dtype) if self._config.round_weights else weights, chosen


def _load_expert(weights: WeightLoader, names: list[str], hidden: int, experts: MoEConfig) -> GatedMLP:
    gate, up, down = names
    inner = experts.moe_intermediate_size
    gate_up = weights.linear([gate, up], [inner, inner], hidden, bias=False)
    return GatedMLP(gate_up, weights.linear([down], [hidden], inner, bias=False))


def _load_stacked_expert(weights: WeightLoader, name: str, hidden: int, experts: MoEConfig, index: int) -> GatedMLP:
    count, inner = experts.num_experts, experts.moe_intermediate_size
    gate_up = weights.expert_linear(f"{name}.gate_up_proj", (count, 2 * inner, hidden), index)
    return GatedMLP(gate_up, weights.expert_linear(f"{name}.down_proj", (count, hidden, inner), index))
