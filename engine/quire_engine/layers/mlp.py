"""The parts that decoders share: weights read as layers, the norm, the gated feed-forward part. Knows no attention and
no order of layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire_engine.checkpoint.config import DecoderConfig, MoEConfig
from quire_engine.checkpoint.weights import Checkpoint, LoadOptions
from quire_engine.distributed.communicator import SINGLE_RANK, Communicator, largest_shard_size, shard
from quire_engine.kernels.ops import add_rms_norm, rms_norm
from quire_engine.layers.linear import GatheredColumnParallelLinear, Linear, RowParallelLinear, make_linear


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint, read as tensors and layers of one dtype, as ``options`` say: those that ranks share are read as far
    as they are this rank's.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    options: LoadOptions

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.options.device

    @property
    def communicator(self) -> Communicator:
        """The processes that share the model."""
        return self.options.communicator

    def load_fused(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Whole tensors under each other, as one."""
        return self.checkpoint.load_fused(names, shapes, self.dtype, self.device)

    def load_row(self, name: str, shape: tuple[int, ...], index: int) -> torch.Tensor:
        """The tensor at ``index`` of those that are stored under each other as ``name``, of ``shape`` in all."""
        return self.checkpoint.load_row(name, shape, index, self.dtype, self.device)

    def linear(self, names: Sequence[str], outputs: Sequence[int], inputs: int, *, bias: bool) -> Linear:
        """Whole linear layers of the same input as one, whose outputs lie beside each other."""
        return self._linear(names, outputs, inputs, SINGLE_RANK, bias=bias)

    def column_parallel_linear(
        self, names: Sequence[str], outputs: Sequence[int], inputs: int, *, bias: bool
    ) -> Linear:
        """Linear layers of the same input as one: of the outputs of each this rank's share, beside each other."""
        return self._linear(names, outputs, inputs, self.communicator, bias=bias)

    def row_parallel_linear(self, name: str, outputs: int, inputs: int, *, bias: bool) -> Linear:
        """A linear layer that takes this rank's share of the inputs. All ranks get the whole output."""
        weight = self._load_sharded([f"{name}.weight"], [(outputs, inputs)], self.communicator, divided=1)
        added = self.load_fused([f"{name}.bias"], [(outputs,)]) if bias and self.communicator.rank == 0 else None
        part = make_linear(weight, added, self.options)
        return part if self.communicator.size == 1 else RowParallelLinear(part, self.communicator)

    def lm_head(self, name: str, outputs: int, inputs: int, held: torch.Tensor | None) -> Linear:
        """The layer without bias that makes logits, of which each rank makes a share; rank 0 gets all of them. Its
        whole weight is ``held`` already, or is stored as ``name``.
        """
        if held is None:
            weight = self._load_sharded([f"{name}.weight"], [(outputs, inputs)], self.communicator)
        else:
            weight = held[shard(outputs, self.communicator)]
        if self.communicator.size == 1:
            return make_linear(weight, None, self.options)
        missing = largest_shard_size(outputs, self.communicator) - len(weight)
        padded = torch.cat((weight, weight.new_zeros(missing, inputs))) if missing else weight
        return GatheredColumnParallelLinear(make_linear(padded, None, self.options), outputs, self.communicator)

    def _linear(
        self, names: Sequence[str], outputs: Sequence[int], inputs: int, ranks: Communicator, *, bias: bool
    ) -> Linear:
        weight = self._load_sharded([f"{name}.weight" for name in names], [(size, inputs) for size in outputs], ranks)
        added = (
            self._load_sharded([f"{name}.bias" for name in names], [(size,) for size in outputs], ranks)
            if bias
            else None
        )
        return make_linear(weight, added, self.options)

    def _load_sharded(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], ranks: Communicator, divided: int = 0
    ) -> torch.Tensor:
        return self.checkpoint.load_fused(names, shapes, self.dtype, self.device, ranks=ranks, divided=divided)


class RMSNorm:
    """Root mean square normalisation (Zhang and Sennrich 2019) of the last dimension."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self._weight = weights.load_fused([f"{name}.weight"], [(size,)])
        self._eps = eps

    def __call__(self, states: torch.Tensor, update: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of ``states``, to which ``update`` is added in place first."""
        if update is None:
            return rms_norm(states, self._weight, self._eps)
        return add_rms_norm(update, states, self._weight, self._eps)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """The gated feed-forward part (SwiGLU, Shazeer 2020), with gate and up projections fused."""

    gate_up_proj: Linear
    down_proj: Linear

    @classmethod
    def load(cls, weights: Weights, name: str, hidden: int, inner: int, *, bias: bool) -> "GatedMLP":
        """The part called ``name``, of ``hidden`` inputs and outputs and ``inner`` numbers between, which the ranks
        share.
        """
        inputs = [f"{name}.gate_proj", f"{name}.up_proj"]
        gate_up = weights.column_parallel_linear(inputs, [inner, inner], hidden, bias=bias)
        return cls(gate_up, weights.row_parallel_linear(f"{name}.down_proj", hidden, inner, bias=bias))

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """``states`` [T, hidden] -> [T, hidden]."""
        return self.down_proj(self.gate_up_proj.forward_silu_mul(states))


# Mixture of experts (Shazeer et al. 2017) as Mixtral and Qwen3-MoE have it: a router, and feed-forward parts of which
# each token takes a few. Knows neither attention nor the batch's sequences.


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
