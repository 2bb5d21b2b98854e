"""Mixtral (Jiang et al. 2024)."""

from pathlib import Path
from typing import Any

from quire_engine.checkpoint.config import DecoderConfig, MoEConfig
from quire_engine.layers.mlp import ExpertNames, MoE
from quire_engine.layers.weight_loader import WeightLoader
from quire_engine.models.mistral import MistralForCausalLM


class MixtralForCausalLM(MistralForCausalLM):
    """Mistral with a mixture of experts in each layer. The router's weights stay in float32."""

    @classmethod
    def config_fields(cls, path: Path, hf: Any) -> dict[str, Any]:
        """See ``DecoderModel``."""
        moe = MoEConfig(
            num_experts=hf.num_experts,
            num_experts_per_tok=hf.num_experts_per_tok,
            moe_intermediate_size=hf.intermediate_size,
            norm_topk_prob=True,
            round_weights=False,
            is_moe_layer=(True,) * hf.num_hidden_layers,
        )
        return {**super().config_fields(path, hf), "moe": moe}

    @classmethod
    def load_mlp(cls, config: DecoderConfig, weights: WeightLoader, index: int) -> MoE:
        """See ``LlamaForCausalLM``."""
        return MoE.load(config, weights, index, ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"))
