"""Encoders: models whose tokens attend in both directions, which pool prompts and do not generate.

``EncoderModel`` runs transformers' unmodified code on the prompts of a step, packed one after another without padding.
transformers calls attention through a registered function that knows where each prompt begins. When a model is loaded,
its hidden states are compared with transformers' own attention on each prompt alone. A model whose attention does more
than this function is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from quire_engine.attention.base import AttentionBackend, LayerKV
from quire_engine.checkpoint.architecture import architecture_of, refuse_code
from quire_engine.checkpoint.config import (
    ModelConfig,
    compute_revision,
    config_path,
    is_positive_int,
    one_line,
    read_config_json,
    to_hf_config,
)
from quire_engine.config.capabilities import ENCODER, CapabilityRow
from quire_engine.errors import ModelError
from quire_engine.layers.weight_loader import WeightLoader
from quire_engine.models.base import Classifier, Model
from quire_engine.models.transformers_backend import load_weights

PACKED_ATTENTION = "quire-packed"
MAX_DIFFERENCE, MAX_DIFFERENCE_FLOAT32 = 0.1, 1e-3
"""The most that hidden states may differ from transformers' own, relative to their root mean square."""


@dataclass(frozen=True, slots=True)
class EncoderConfig(ModelConfig):
    """``hf_config`` is transformers' configuration and ``model_class`` the class of the model. The first token has
    position ``position_offset``. ``num_token_types`` counts the token types.
    """

    hf_config: Any = field(repr=False)
    model_class: Any = field(repr=False)
    position_offset: int = 0
    num_token_types: int = 1

    @property
    def is_causal(self) -> bool:
        """See ``ModelConfig``."""
        return False

    @classmethod
    def read(cls, folder: Path) -> "EncoderConfig":
        """Reads ``config.json``. Raises ``ModelError``, also if transformers does not have the class."""
        import transformers

        path, raw = config_path(folder), read_config_json(folder)
        architecture = architecture_of(path, raw)
        model_class, model_type = getattr(transformers, architecture, None), raw.get("model_type")
        if model_class is None or model_type not in transformers.CONFIG_MAPPING:
            refuse_code(path, raw)
            raise ModelError(f"{path} names {architecture} of type {model_type!r}, which transformers does not have.")
        parsed = to_hf_config(path, raw, transformers.CONFIG_MAPPING[model_type])
        length, vocabulary = parsed.max_position_embeddings, parsed.vocab_size
        if not (is_positive_int(length) and is_positive_int(vocabulary)):
            raise ModelError(f"{path} has no max_position_embeddings, or no vocab_size.")
        offset = _position_offset(model_class, parsed)
        return cls(
            architecture=architecture,
            vocab_size=vocabulary,
            max_length=length - offset,
            eos_token_ids=(),
            model_revision=compute_revision(folder),
            hf_config=parsed,
            model_class=model_class,
            position_offset=offset,
            num_token_types=getattr(parsed, "type_vocab_size", 0) or 1,
        )


def _position_offset(model_class: Any, parsed: Any) -> int:
    """Returns the position of the first token. RoBERTa and its descendants count positions from after the padding's."""
    modules = __import__(model_class.__module__, fromlist=["_"])
    counts = any(hasattr(part, "create_position_ids_from_input_ids") for part in vars(modules).values())
    return int(parsed.pad_token_id) + 1 if counts else 0


class EncoderModel(Model):
    """An encoder with its weights, and with its head if it classifies. It has no KV memory: each step computes whole
    prompts, of which the attention knows the batch.
    """

    attention_layers = ()

    @classmethod
    def capability_rows(cls, config: EncoderConfig) -> Sequence[CapabilityRow]:
        """See ``Model``."""
        del config
        return (ENCODER,)

    @classmethod
    def load(cls, config: EncoderConfig, folder: Path, weights: WeightLoader) -> "EncoderModel":
        """See ``Model``. Raises ``ModelError`` also if the model's prompts cannot be packed."""
        from transformers import AttentionInterface

        AttentionInterface.register(PACKED_ATTENTION, packed_attention)
        model = load_weights(config, folder, weights.checkpoint, weights.dtype).to(weights.device).eval()
        try:
            with torch.inference_mode():
                return _make_checked(model, config)
        except ModelError:
            raise
        except Exception as error:  # noqa: BLE001 - a model's code may raise anything
            reason = f"It does not run: {one_line(error)}."
        raise ModelError(f"{folder} holds a {config.architecture}, which cannot be served. {reason}")

    def __init__(self, model: Any, config: EncoderConfig) -> None:
        self.dtype = model.dtype
        self._config = config
        self._body = model.base_model
        self._classifier = None if self._body is model else _make_classifier(model)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Model.forward``."""
        del kv
        (batch,) = attention.batches
        return self.encode(token_ids, positions.long(), batch.query_indptr.diff().tolist(), token_types)

    def encode(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: Sequence[int],
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns hidden states [T, hidden] of prompts of these ``lengths``, one after another. The other arguments are
        int64 [T], as in ``Model.forward``.
        """
        inputs = {"input_ids": token_ids[None], "position_ids": positions[None] + self._config.position_offset}
        if self._config.num_token_types > 1:
            types = torch.zeros_like(token_ids) if token_types is None else token_types
            inputs["token_type_ids"] = types[None]
        hidden: torch.Tensor = self._body(**inputs, quire_lengths=lengths).last_hidden_state[0]
        return hidden

    def logits(self, _hidden: torch.Tensor) -> torch.Tensor:
        """See ``Model.logits``. The scheduler refuses every request that would need them."""
        raise AssertionError("an encoder makes no tokens")

    def load_classifier(self, config: EncoderConfig, folder: Path, device: torch.device) -> Classifier | None:
        """See ``Model``. It was loaded with the model."""
        del config, folder, device
        return self._classifier


def _make_classifier(model: Any) -> Classifier:
    """Returns the model's own head, for hidden states that were pooled before. Replaces the body of ``model`` by one
    that returns them, each as a sequence of one token.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    pooler = getattr(model.base_model, "pooler", None)

    def pass_through(*_: object, inputs_embeds: torch.Tensor, **__: object) -> Any:
        pooled = None if pooler is None else pooler(inputs_embeds)
        return BaseModelOutputWithPooling(last_hidden_state=inputs_embeds, pooler_output=pooled)

    def classify(states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(inputs_embeds=states[:, None].to(model.dtype)).logits
        return logits.float()

    replacement = torch.nn.Module()
    replacement.forward = pass_through
    setattr(model, model.base_model_prefix, replacement)
    return classify


def _make_checked(model: Any, config: EncoderConfig) -> EncoderModel:
    """Returns the encoder. Raises ``ModelError`` if packed prompts give other hidden states than transformers' own
    attention.
    """
    lengths = [min(length, config.max_length) for length in (5, 17, 3)]
    prompts = [[(7 + 31 * (first + each)) % config.vocab_size for each in range(n)] for first, n in enumerate(lengths)]
    padding = getattr(config.hf_config, "pad_token_id", None)
    prompts = [[token for token in prompt if token != padding] for prompt in prompts]
    alone = [model.base_model(input_ids=_row(each, model.device)).last_hidden_state[0] for each in prompts]
    expected = torch.cat(alone)
    model.set_attn_implementation(PACKED_ATTENTION)
    encoder = EncoderModel(model, config)
    token_ids = _row([token for prompt in prompts for token in prompt], model.device)[0]
    lengths = [len(prompt) for prompt in prompts]
    positions = torch.cat([torch.arange(length, device=model.device) for length in lengths])
    difference = (encoder.encode(token_ids, positions, lengths) - expected).float().abs().max()
    scale = expected.float().square().mean().sqrt()
    if not difference <= (MAX_DIFFERENCE_FLOAT32 if encoder.dtype == torch.float32 else MAX_DIFFERENCE) * scale:
        raise ModelError(
            f"{config.architecture} has other hidden states where prompts are packed: its attention does more than to "
            "look at all tokens, or at the tokens of a window."
        )
    return encoder


def _row(token_ids: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([token_ids], device=device)


def packed_attention(
    _module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: object,
    quire_lengths: Sequence[int],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **__: object,
) -> tuple[torch.Tensor, None]:
    """Computes attention within each prompt: ``query``, ``key`` and ``value`` [1, heads, T, head_dim] -> [1, T, heads,
    head_dim]. A token attends to all tokens of its own prompt, or to those less than ``sliding_window`` away.
    """
    parts = []
    queries, keys, values = (tensor.split(list(quire_lengths), dim=2) for tensor in (query, key, value))
    for length, own, own_keys, own_values in zip(quire_lengths, queries, keys, values, strict=True):
        mask = None
        if sliding_window is not None and length > sliding_window:
            places = torch.arange(length, device=query.device)
            mask = (places[:, None] - places).abs() < sliding_window
        parts.append(scaled_dot_product_attention(own, own_keys, own_values, attn_mask=mask, scale=scaling))
    return torch.cat(parts, dim=2).transpose(1, 2), None
