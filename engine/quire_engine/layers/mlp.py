"""The feed-forward networks of a decoder layer: ``GatedMLP``, and ``MoE``, a mixture of experts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import repeat
from typing import Any, ClassVar, Protocol

import torch

from quire_engine.checkpoint.config import DecoderConfig, MoEConfig
from quire_engine.distributed.communicator import SINGLE_RANK, Communicator, PendingSum, largest_shard_size, shard
from quire_engine.kernels.experts_kernel import ExpertsKernel, Packed, route
from quire_engine.kernels.fused_moe import FusedExperts
from quire_engine.kernels.ops import ClampedSwiGLU, silu_mul
from quire_engine.kernels.packed_linear import in_arena
from quire_engine.layers.linear import start_sum
from quire_engine.layers.weight_loader import WeightLoader
from quire_engine.quantization.base import Activation, LayerSpec, Linear, LinearMethod, with_activation
from quire_engine.quantization.quantized_linear import QuantizedLinear
from quire_engine.quantization.unquantized import PackedLinear, UnquantizedMethod

STACKED_NAMES = ("gate_up_proj", "down_proj")
"""The names that transformers gives to the stacked tensors of all experts."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """The gated feed-forward network (GLU variants, Shazeer 2020), with fused gate and up projections. ``activation``
    is ``silu_mul`` for SwiGLU.
    """

    has_experts: ClassVar[bool] = False
    is_capturable: ClassVar[bool] = True

    gate_up_proj: Linear
    down_proj: Linear
    activation: Activation = silu_mul
    _activated: Activation = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_activated", with_activation(self.gate_up_proj, self.activation))

    @classmethod
    def load(
        cls,
        weights: WeightLoader,
        name: str,
        hidden: int,
        inner: int,
        *,
        bias: bool = False,
        activation: Activation = silu_mul,
    ) -> "GatedMLP":
        """Loads the tensors under ``name``. The network has ``hidden`` inputs and outputs, and each rank has a shard of
        the intermediate size ``inner``.
        """
        inputs = [f"{name}.gate_proj", f"{name}.up_proj"]
        gate_up = weights.column_parallel_linear(inputs, [inner, inner], hidden, bias=bias)
        return cls(gate_up, weights.row_parallel_linear(f"{name}.down_proj", hidden, inner, bias=bias), activation)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Maps ``states`` [T, hidden] to [T, hidden]."""
        return self.down_proj(self._activated(states))

    def start(self, states: torch.Tensor) -> PendingSum:
        """Like a call, for a network that ranks share, but returns a pending sum."""
        return start_sum(self.down_proj, self._activated(states))


class Experts(Protocol):
    """The experts of an MoE layer: all of them, or one rank's."""

    @property
    def is_capturable(self) -> bool:
        """Whether a graph can repeat them: the host reads no number of tokens."""
        ...

    def __call__(self, states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Returns [T, hidden]: for each token, the weighted sum of the outputs of its experts that are held here. Adds
        them in the router's order, independently of the rest of the batch.

        ``states`` [T, hidden], ``topk_weights`` [T, N] float32, ``topk_ids`` [T, N] int64 among all experts of the
        layer.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names that published checkpoints give to an MoE block in a layer, and to an expert's projections."""

    block: str
    gate: str
    up: str
    down: str


class MoE:
    """A mixture of experts (Shazeer et al. 2017) as in Mixtral and Qwen3-MoE: a router sends each token to a few
    experts, each of which is a ``GatedMLP``.

    ``router`` (hidden to number of experts) and ``experts`` have one dtype and device. If ranks share the experts
    (expert parallelism, GShard, Lepikhin et al. 2020), ``experts`` are this rank's. Each rank then sees and routes all
    tokens in the same way, computes its own experts, and the ranks of ``communicator`` sum the outputs. Or each rank
    sees only its own tokens, and ``experts`` are ``AllToAllExperts``, which need no such sum.
    """

    has_experts: ClassVar[bool] = True

    def __init__(
        self, config: MoEConfig, router: Linear, experts: Experts, communicator: Communicator = SINGLE_RANK
    ) -> None:
        self._config = config
        self._router = router
        self._experts = experts
        self._communicator = communicator

    @classmethod
    def load(cls, config: DecoderConfig, weights: WeightLoader, index: int, stored: ExpertNames) -> "MoE":
        """Loads layer ``index``. Experts are ``stored`` as published, one tensor per projection and expert, or as
        transformers writes them, one tensor for all experts.
        """
        experts = config.moe
        assert experts is not None, "the layer has experts"
        layer, hidden = f"model.layers.{index}", config.hidden_size
        stacked = f"{layer}.mlp.experts.gate_up_proj" in weights.checkpoint
        block, projections = ("mlp", ()) if stacked else (stored.block, (stored.gate, stored.up, stored.down))
        router = weights.router(f"{layer}.{block}.gate", experts.num_experts, hidden)
        names = [
            [f"{layer}.{block}.experts.{each}.{name}" for name in projections] for each in range(experts.num_experts)
        ]
        tensor_names = weights.quantization.linear.tensor_names
        weights.checkpoint.mark_used(tensor for each in names for name in each for tensor in tensor_names(name))
        own = shard(experts.num_experts, weights.expert_communicator)
        method, inner = weights.quantization.linear, experts.moe_intermediate_size

        def read(part: int) -> Iterator[Any]:
            """Yields gate and up (0) or down (1) of each of this rank's experts."""
            outputs, inputs = ([inner, inner], hidden) if part == 0 else ([hidden], inner)
            for each in range(experts.num_experts)[own]:
                if stacked:
                    name, shape = (
                        f"{layer}.mlp.experts.{STACKED_NAMES[part]}",
                        (experts.num_experts, sum(outputs), inputs),
                    )
                    yield method.read_expert(weights.checkpoint, name, shape, each)
                else:
                    some = names[each][:2] if part == 0 else names[each][2:]
                    yield method.read(weights.checkpoint, LayerSpec(some, outputs, inputs))

        return cls.shared(experts, router, make_experts(experts, method, read, own, weights.dtype), weights)

    @classmethod
    def shared(cls, config: MoEConfig, router: Linear, experts: Experts, weights: WeightLoader) -> "MoE":
        """Makes the layer from this rank's ``experts``."""
        if weights.sends_tokens:
            return cls(config, router, AllToAllExperts(experts, config.num_experts, weights.expert_communicator))
        return cls(config, router, experts, weights.communicator)

    @property
    def is_capturable(self) -> bool:
        """Whether no number of tokens is read by the host."""
        return self._experts.is_capturable

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Maps ``states`` [T, hidden] to [T, hidden], for all tokens or for this rank's."""
        return self._communicator.all_reduce(self._of_own_experts(states))

    def start(self, states: torch.Tensor) -> PendingSum:
        """Like a call, but returns a pending sum."""
        return self._communicator.all_reduce_async(self._of_own_experts(states))

    def _of_own_experts(self, states: torch.Tensor) -> torch.Tensor:
        weights, chosen = route(
            self._router(states),
            self._config.num_experts_per_tok,
            normalise=self._config.norm_topk_prob,
            round_weights=self._config.round_weights,
        )
        return self._experts(states, weights, chosen)


class AllToAllExperts:
    """The ``Experts`` of all ranks, for tokens that each rank has for itself (GShard; DeepSpeed-MoE, Rajbhandari et al.
    2022). A token goes once to each rank that holds some of its experts, and returns as their sum.

    ``local`` are this rank's ``shard`` of ``num_experts``. All ranks must call it together; a rank may have no tokens.
    The sums from a token's ranks are added in rank order in float32, like an ordered ``Communicator.all_reduce``, so
    the result has the same bits.
    """

    is_capturable = False

    def __init__(self, local: Experts, num_experts: int, communicator: Communicator) -> None:
        self._local = local
        self._experts_per_rank = largest_shard_size(num_experts, communicator)
        self._communicator = communicator

    def __call__(self, states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """See ``Experts``."""
        (tokens, hidden), size, all_to_all = states.shape, self._communicator.size, self._communicator.all_to_all
        is_sent = torch.zeros(size, tokens, dtype=torch.bool, device=states.device)
        is_sent.T.scatter_(1, topk_ids // self._experts_per_rank, True)
        sent, received = self._communicator.exchange_counts(is_sent.sum(1), tokens)
        token = is_sent.nonzero()[:, 1]  # by destination rank, then in token order
        rows = torch.cat((states, _pack_choice(topk_weights, topk_ids, states.dtype)), 1)[token]
        rows = all_to_all(rows, sent, received)
        made = self._local(rows[:, :hidden], *_unpack_choice(rows[:, hidden:]))
        total = torch.zeros(tokens, hidden, dtype=torch.float32, device=states.device)
        parts = all_to_all(made, received, sent)
        for own_token, part in zip(token.split(sent), parts.split(sent), strict=True):
            total.index_add_(0, own_token, part.float())
        return total.to(states.dtype)


def _pack_choice(topk_weights: torch.Tensor, topk_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Packs the weights and ids of experts into numbers of ``dtype`` with the same bits, to be sent with a token's
    states.
    """
    return torch.cat((topk_weights, topk_ids.int().view(torch.float32)), 1).view(dtype)


def _unpack_choice(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights and ids from ``_pack_choice``."""
    weights, ids = packed.clone(memory_format=torch.contiguous_format).view(torch.float32).chunk(2, 1)
    return weights.contiguous(), ids.contiguous().view(torch.int32).long()


class ExpertLoop:
    """``Experts`` that run one after the other, each on all of its tokens at once. Works with any kind of linear layer.

    ``experts`` have the indices ``own`` among ``num_experts``. With ``round_weights``, weights and the products with
    them have the dtype of the states.
    """

    is_capturable = False

    def __init__(self, experts: Sequence[GatedMLP], own: slice, num_experts: int, *, round_weights: bool) -> None:
        self._experts = experts
        self._own, self._num_experts = own, num_experts
        self._round_weights = round_weights

    def __call__(self, states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """See ``Experts``."""
        order = topk_ids.flatten().argsort(stable=True)
        counts = topk_ids.flatten().bincount(minlength=self._num_experts).tolist()
        first = sum(counts[: self._own.start])
        counts = counts[self._own]
        order = order[first : first + sum(counts)]
        outputs = states[order // topk_ids.shape[1]]
        for expert, rows in zip(self._experts, outputs.split(counts), strict=True):
            if len(rows):
                rows.copy_(expert(rows))
        weights = topk_weights.to(states.dtype) if self._round_weights else topk_weights
        weighted = weights.new_zeros(topk_ids.numel(), states.shape[1])
        weighted[order] = outputs * weights.flatten()[order, None]
        return weighted.view(*topk_ids.shape, states.shape[1]).sum(1).to(states.dtype)


def make_experts(
    config: MoEConfig,
    method: LinearMethod[Any],
    read: Callable[[int], Iterable[Any]],
    own: slice,
    dtype: torch.dtype,
    *,
    biases: Callable[[int], Iterable[torch.Tensor]] | None = None,
) -> Experts:
    """Makes the experts ``own`` in the fastest available form. ``read`` yields what ``method`` read for each expert,
    gate and up (0) or down (1), and ``biases`` yields their biases.
    """
    if (
        biases is None
        and config.swiglu_limit is None
        and isinstance(method, UnquantizedMethod)
        and method.options.device.type == "cuda"
        and find_spec("triton") is not None
    ):
        gate_up, down = (in_arena(_stack(list(read(part)))) for part in (0, 1))
        deterministic = method.options.config.deterministic
        count = config.num_experts
        return FusedExperts(
            gate_up, down, own.start, count, round_weights=config.round_weights, deterministic=deterministic
        )
    parts = []
    for part in (0, 1):
        added = repeat(None) if biases is None else biases(part)
        parts.append([method.pack(weight, bias) for weight, bias in zip(read(part), added, strict=False)])
    gate_up, down = ([_packed(layer) for layer in layers] for layers in parts)
    clamped = None if config.swiglu_limit is None else ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit)
    kernel = ExpertsKernel.of(gate_up, down, own.start, dtype, round_weights=config.round_weights, clamped=clamped)
    if kernel is not None:
        return kernel
    experts = [GatedMLP(up, down, clamped or silu_mul) for up, down in zip(*parts, strict=True)]
    return ExpertLoop(experts, own, config.num_experts, round_weights=config.round_weights)


def _packed(layer: Linear) -> Packed | None:
    return layer.packed if isinstance(layer, PackedLinear | QuantizedLinear) else None


def _stack(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stacks ``weights`` to [experts, out, in]. Without experts the result is empty, because nothing is multiplied."""
    return torch.stack(tuple(weights)) if weights else torch.empty(0, 0, 0)
