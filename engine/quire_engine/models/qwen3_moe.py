"""Qwen3-MoE (Yang et al. 2025)."""

from pathlib import Path
from typing import Any

from quire_engine.checkpoint.config import DecoderConfig, MoEConfig, attention_biases, is_positive_int, same_window
from quire_engine.errors import ModelError
from quire_engine.layers.mlp import ExpertNames, GatedMLP, MoE
from quire_engine.layers.weight_loader import WeightLoader
from quire_engine.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3 with a mixture of experts in some layers. All layers may have the same window."""

    @classmethod
    def config_fields(cls, path: Path, hf: Any) -> dict[str, Any]:
        """See ``DecoderModel``."""
        moe = MoEConfig(
            num_experts=hf.num_experts,
            num_experts_per_tok=hf.num_experts_per_tok,
            moe_intermediate_size=hf.moe_intermediate_size,
            norm_topk_prob=bool(hf.norm_topk_prob),
            round_weights=True,
            is_moe_layer=_moe_layers(path, hf),
        )
        return {**attention_biases(hf), "sliding_windows": same_window(path, hf), "moe": moe}

    @classmethod
    def load_mlp(cls, config: DecoderConfig, weights: WeightLoader, index: int) -> GatedMLP | MoE:
        """See ``LlamaForCausalLM``."""
        if config.moe is None or not config.moe.is_moe_layer[index]:
            return super().load_mlp(config, weights, index)
        return MoE.load(config, weights, index, ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj"))


def _moe_layers(path: Path, hf: Any) -> tuple[bool, ...]:
    """Returns whether each layer is MoE: every ``decoder_sparse_step``-th, except ``mlp_only_layers``."""
    step, dense = hf.decoder_sparse_step, hf.mlp_only_layers
    if not is_positive_int(step):
        raise ModelError(f"{path} says that decoder_sparse_step is {step!r}, and it must be a whole number above 0.")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(hf.num_hidden_layers))
