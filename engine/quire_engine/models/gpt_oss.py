"""gpt-oss (OpenAI 2025)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from quire_engine.checkpoint.config import DecoderConfig, MoEConfig, attention_biases, windows_by_layer_type
from quire_engine.distributed.communicator import shard
from quire_engine.errors import ModelError
from quire_engine.layers.attention import Attention
from quire_engine.layers.decoder_layer import DecoderLayer
from quire_engine.layers.mlp import STACKED_NAMES, MoE, make_experts
from quire_engine.layers.weight_loader import WeightLoader
from quire_engine.models.decoder import DecoderModel
from quire_engine.quantization.mxfp4 import is_mxfp4, load_mxfp4, mxfp4_shape


class GptOssForCausalLM(DecoderModel):
    """gpt-oss: each head has an attention sink, some layers have a window, and each layer has a mixture of experts with
    biases and a clamped activation. Experts may be stored in MXFP4.
    """

    @classmethod
    def config_fields(cls, path: Path, hf: Any) -> dict[str, Any]:
        """See ``DecoderModel``."""
        alpha, limit = float(hf.swiglu_alpha), float(hf.swiglu_limit)
        if not limit > 0:
            raise ModelError(f"{path} says that swiglu_limit is {hf.swiglu_limit!r}, and it must be above 0.")
        moe = MoEConfig(
            num_experts=hf.num_local_experts,
            num_experts_per_tok=hf.num_experts_per_tok,
            moe_intermediate_size=hf.intermediate_size,
            norm_topk_prob=True,
            round_weights=True,
            is_moe_layer=(True,) * hf.num_hidden_layers,
            swiglu_alpha=alpha,
            swiglu_limit=limit,
        )
        return {**attention_biases(hf), "sliding_windows": windows_by_layer_type(path, hf), "moe": moe}

    @classmethod
    def load_layer(cls, config: DecoderConfig, weights: WeightLoader, index: int) -> DecoderLayer:
        """See ``DecoderModel``."""
        attention = Attention(config, weights, index, sinks=True)
        return DecoderLayer(config, weights, index, attention, _load_experts(config, weights, index))


def _load_experts(config: DecoderConfig, weights: WeightLoader, index: int) -> MoE:
    moe, name, hidden = config.moe, f"model.layers.{index}.mlp", config.hidden_size
    assert moe is not None, "every layer has experts"
    router = weights.router(f"{name}.router", moe.num_experts, hidden, bias=True)
    own = shard(moe.num_experts, weights.expert_communicator)
    experts = range(moe.num_experts)[own]
    sizes = (2 * moe.moe_intermediate_size, hidden), (hidden, moe.moe_intermediate_size)

    def read(part: int) -> Iterator[torch.Tensor]:
        """Yields the weights of each expert, [out, in]: gate and up for part 0, down for part 1."""
        stored = f"{name}.experts.{STACKED_NAMES[part]}"
        for expert in experts:
            matrix = _load_expert(weights, stored, moe.num_experts, sizes[part], expert)
            yield _apart(matrix) if part == 0 else matrix

    def biases(part: int) -> Iterator[torch.Tensor]:
        stored, shape = f"{name}.experts.{STACKED_NAMES[part]}_bias", (moe.num_experts, sizes[part][0])
        for expert in experts:
            bias = weights.checkpoint.load_row(stored, shape, expert, weights.dtype, weights.device)
            yield _apart(bias) if part == 0 else bias

    made = make_experts(moe, weights.quantization.linear, read, own, weights.dtype, biases=biases)
    return MoE.shared(moe, router, made, weights)


def _load_expert(weights: WeightLoader, name: str, count: int, size: tuple[int, int], expert: int) -> torch.Tensor:
    """Returns the weight [out, in] of one of ``count`` experts, stored in MXFP4 or as numbers [in, out]."""
    checkpoint, (outputs, inputs) = weights.checkpoint, size
    if not is_mxfp4(checkpoint, name):
        return checkpoint.load_row(name, (count, inputs, outputs), expert, weights.dtype, weights.device).T.contiguous()
    if (shape := mxfp4_shape(checkpoint, name)) != (count, outputs, inputs):
        raise ModelError(f"{name} has the shape {list(shape)}, and the model needs {[count, outputs, inputs]}.")
    return load_mxfp4(checkpoint, name, expert, weights.dtype).to(weights.device)


def _apart(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns the rows of gate and then the rows of up, which are stored alternately."""
    return torch.cat((gate_up[::2], gate_up[1::2]))
