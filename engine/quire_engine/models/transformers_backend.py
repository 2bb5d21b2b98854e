"""Models without a native implementation: any causal language model of transformers, unmodified, on paged KV memory.

``TransformersConfig`` reads the folder and refuses models that KV blocks or attention backends cannot serve.
``TransformersModel.load`` loads the weights and verifies on two short sequences that paged attention changes nothing
(see ``transformers_check``). transformers calls attention through two registered functions: ``paged_attention`` stores
keys and values in paged memory and attends there, ``probe_attention`` records what each layer requires.
"""

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from quire_engine.attention.base import AttentionBackend, LayerAttention, LayerKV
from quire_engine.checkpoint.architecture import GENERATING_FORMS, architecture_of, refuse_code
from quire_engine.checkpoint.config import (
    ModelConfig,
    compute_revision,
    eos_token_ids,
    is_positive_int,
    one_line,
    read_config_json,
    rope_max_length,
    to_hf_config,
)
from quire_engine.checkpoint.support import STATE_LAYER_TYPES, SUPPORTED_LAYER_TYPES
from quire_engine.checkpoint.weights import Checkpoint
from quire_engine.config.capabilities import KEEPS_STATE, THROUGH_TRANSFORMERS, CapabilityRow
from quire_engine.errors import ModelError
from quire_engine.layers.weight_loader import WeightLoader
from quire_engine.models.base import Model
from quire_engine.models.registry import ARCHITECTURES
from quire_engine.models.transformers_check import check_paged_logits, reference_logits, sample_sequences
from quire_engine.models.transformers_state import STATE_MODEL_TYPES, StateLayers, state_modules
from quire_engine.models.transformers_weights import lazy_state_dict

log = logging.getLogger(__name__)
# Masks are probed up to this length (see ``sliding_window_of``), so no sequence may be longer.
MAX_PROBED_LENGTH = 1 << 20
NUM_PROBE_TOKENS = 3
PAGED_ATTENTION, PROBE_ATTENTION = "quire-paged", "quire-probe"
# Arguments of attention that need no more than a causal mask: positions, and options that are off anyway.
IGNORED_ARGUMENTS = {
    "dropout",
    "scaling",
    "sliding_window",
    "position_ids",
    "use_cache",
    "output_attentions",
    "cache_position",
}
AttentionOutput = tuple[torch.Tensor, None]


@dataclass(frozen=True, slots=True)
class TransformersConfig(ModelConfig):
    """``hf_config`` is transformers' configuration, and ``model_class`` the class of the model."""

    hf_config: Any = field(repr=False)
    model_class: Any = field(repr=False)

    @classmethod
    def read(cls, folder: Path) -> "TransformersConfig":
        """Reads ``config.json``, and ``generation_config.json`` if it exists. Raises ``ModelError``, also if the
        configuration shows that KV blocks or attention backends cannot serve the model.
        """
        path = folder / "config.json"
        raw = read_config_json(folder)
        architecture, config_class = _classes(path, architecture_of(path, raw), raw)
        # Quantised weights are dequantised before transformers gets them.
        plain = {key: value for key, value in raw.items() if key not in ("quantization_config", "auto_map")}
        parsed = to_hf_config(path, plain, config_class)
        _check_text_only(path, parsed)
        model_class = _model_class(path, architecture, parsed)
        vocab_size = _positive_int(path, parsed, "vocab_size")
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            max_length=_max_length(path, parsed),
            eos_token_ids=eos_token_ids(folder, raw, vocab_size),
            model_revision=compute_revision(folder),
            hf_config=parsed,
            model_class=model_class,
        )

    @property
    def keeps_state(self) -> bool:
        """Whether some layers keep a state instead of keys and values."""
        return any(kind in STATE_LAYER_TYPES for kind in _layer_types(self.hf_config))


def _classes(path: Path, architecture: str, raw: dict[str, Any]) -> tuple[str, Any]:
    """Returns the name of the model's class and the class of its configuration, which transformers has for its model
    type. Raises ``ModelError`` if ``architecture`` belongs to another task.
    """
    from transformers import CONFIG_MAPPING, __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = raw.get("model_type")
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
    if known is not None and (architecture == known or architecture.endswith(GENERATING_FORMS)):
        return known, CONFIG_MAPPING[model_type]
    if known is None:
        refuse_code(path, raw)
    raise ModelError(
        f"{path} names {architecture} of type {model_type!r}, which is not a causal language model of transformers "
        f"{__version__}; there are native implementations of {', '.join(ARCHITECTURES)}."
    )


def _model_class(path: Path, architecture: str, parsed: Any) -> Any:
    import transformers

    model_class = getattr(transformers, architecture)
    keeps_state = getattr(model_class, "_is_stateful", False) or any(
        kind in STATE_LAYER_TYPES for kind in _layer_types(parsed)
    )
    if keeps_state and parsed.model_type not in STATE_MODEL_TYPES:
        raise ModelError(f"{path} names {architecture}, which keeps a state that KV blocks cannot hold.")
    # The hybrid models do not declare attention backends; the probe checks them.
    if not (model_class._supports_attention_backend or keeps_state):
        raise ModelError(f"{path} names {architecture}, whose attention cannot be replaced by a paged one.")
    return model_class


def _check_text_only(path: Path, parsed: Any) -> None:
    try:
        text_only = parsed.get_text_config() is parsed
    except ValueError:
        text_only = False
    if not text_only:
        raise ModelError(f"{path} describes a model of more than text ({parsed.model_type}), which is not supported.")
    for kind in _layer_types(parsed):
        if kind not in SUPPORTED_LAYER_TYPES:
            raise ModelError(
                f"{path} has layers of type {kind!r}, and supported are {', '.join(SUPPORTED_LAYER_TYPES)}."
            )


def _layer_types(parsed: Any) -> Sequence[str]:
    return getattr(parsed, "layer_types", None) or ()


def _positive_int(path: Path, parsed: Any, name: str) -> int:
    value: Any = getattr(parsed, name, None)
    if not is_positive_int(value):
        raise ModelError(f"{path} says that {name} is {value!r}, and it must be a whole number above 0.")
    return int(value)


def _max_length(path: Path, parsed: Any) -> int:
    _positive_int(path, parsed, "max_position_embeddings")
    try:
        return max_sequence_length(parsed)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} has rope parameters that do not work: {one_line(error)}.") from None


def max_sequence_length(parsed: Any) -> int:
    """Returns the longest sequence in tokens, over the rope of every kind of layer.

    With LongRoPE it is the original length, because the frequencies of all keys change there. With chunked attention
    (Llama 4) it is one chunk, within which such attention is causal.
    """
    length = int(parsed.max_position_embeddings)
    if "chunked_attention" in _layer_types(parsed):
        length = min(length, int(parsed.attention_chunk_size))
    return min([MAX_PROBED_LENGTH, *(rope_max_length(length, rope) for rope in _rope_parameters(parsed))])


def _rope_parameters(parsed: Any) -> list[dict[str, Any]]:
    """Returns the rope parameters: one set for all layers, or one for each kind of layer."""
    parameters = getattr(parsed, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    return nested or [parameters]


@dataclass(slots=True)
class PagedAttentionContext:
    """The attention of one step, passed through the model's keyword arguments. ``layers`` has the attention and the KV
    memory of each layer with attention, by the layer's index.
    """

    attention: AttentionBackend
    layers: dict[int, tuple[LayerAttention, LayerKV]]


@dataclass(slots=True)
class AttentionProbe:
    """Collects the attention of the layers, in the order of their calls: each layer's index, its attention and its
    keys, which may be another layer's.
    """

    indices: list[int] = field(default_factory=list)
    layers: list[LayerAttention] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)

    def add(self, index: int, layer: LayerAttention, key: torch.Tensor) -> None:
        """Adds the next layer. If its keys are the same tensor as an earlier layer's, the layer shares them."""
        shared = next((place for place, other in enumerate(self.keys) if other is key), None)
        self.indices.append(index)
        self.layers.append(replace(layer, kv_layer=shared))
        self.keys.append(key)


class TransformersModel(Model):
    """An unmodified causal language model.

    ``causal`` is the model with its weights; this object owns and modifies it. Its decoder and its head are called
    separately: the decoder for all tokens, the head only for tokens whose logits are needed. Raises ``ModelError`` for
    an attention that no backend supports.
    """

    @classmethod
    def capability_rows(cls, config: TransformersConfig) -> Sequence[CapabilityRow]:
        """See ``Model``."""
        return (THROUGH_TRANSFORMERS, KEEPS_STATE) if config.keeps_state else (THROUGH_TRANSFORMERS,)

    @classmethod
    def load(cls, config: TransformersConfig, folder: Path, weights: WeightLoader) -> "TransformersModel":
        """See ``Model``. Raises ``ModelError`` also for a model that paged attention cannot serve."""
        register_attention()
        causal = load_weights(config, folder, weights.checkpoint, weights.dtype).to(weights.device).eval()
        try:
            with torch.inference_mode():
                return _make_checked(causal, config)
        except ModelError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - a model's code may raise anything
            reason = f"It does not run: {one_line(error)}."
        raise ModelError(f"{folder} holds a {config.architecture}, which cannot be served. {reason}")

    def __init__(self, causal: Any) -> None:
        self._causal = causal
        self._decoder: Any = causal.base_model.get_decoder()
        if self._decoder is causal:  # Llama 4's text part, which has the prefix of the whole model
            self._decoder = getattr(causal, "model", causal)
        if self._decoder is causal:
            raise ModelError("It is not divided into a body and a head.")
        states = StateLayers(state_modules(self._decoder))
        probe = self._probe()
        self.attention_layers = _checked_layers(probe, states.indices)
        if states.indices:
            self.recurrent_layers = states
        self._indices = probe.indices
        self.dtype = probe.keys[0].dtype
        self._output_class: Any = None
        replacement = torch.nn.Module()
        replacement.forward = self._pass_through
        causal.set_submodule(next(name for name, part in causal.named_modules() if part is self._decoder), replacement)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        _token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``Model.forward``."""
        layers = zip(self.attention_layers, kv, strict=True)
        context = PagedAttentionContext(attention, dict(zip(self._indices, layers, strict=True)))
        output = self._run_decoder(token_ids, positions, quire_step=context)
        self._output_class = type(output)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Model.logits``."""
        logits: torch.Tensor = self._causal(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def _pass_through(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> Any:
        """Replaces the decoder inside ``causal``, and returns hidden states that were computed before.

        The model's own code then applies the scales, caps and biases around its head.
        """
        return self._output_class(last_hidden_state=inputs_embeds)

    def _run_decoder(self, token_ids: torch.Tensor, positions: torch.Tensor, **context: object) -> Any:
        return self._decoder(
            input_ids=token_ids[None].long(), position_ids=positions[None].long(), use_cache=False, **context
        )

    def _probe(self) -> AttentionProbe:
        """Returns the attention that the layers require."""
        probe, positions = AttentionProbe(), torch.arange(NUM_PROBE_TOKENS, device=self._causal.device)
        self._causal.set_attn_implementation(PROBE_ATTENTION)
        self._run_decoder(positions, positions, quire_probe=probe)
        self._causal.set_attn_implementation(PAGED_ATTENTION)
        return probe


def _checked_layers(probe: AttentionProbe, others: Set[int]) -> tuple[LayerAttention, ...]:
    """Returns the attention of each layer except ``others``. Raises ``ModelError`` if KV blocks or backends do not
    support it.
    """
    layers = probe.layers
    if not layers or probe.indices != [index for index in range(len(layers) + len(others)) if index not in others]:
        raise ModelError("Not every layer has exactly one attention.")
    if any(key.dtype != probe.keys[0].dtype for key in probe.keys):
        raise ModelError("Its layers have keys of different types.")
    scales: dict[tuple[int, int, int], tuple[float, float | None]] = {}
    for layer in layers:
        if layer.num_heads % layer.num_kv_heads:
            raise ModelError(f"Its {layer.num_heads} heads cannot share {layer.num_kv_heads} KV heads evenly.")
        heads, scale = (layer.num_heads, layer.num_kv_heads, layer.head_dim), (layer.scale, layer.soft_cap)
        if scales.setdefault(heads, scale) != scale:
            raise ModelError("Its layers differ in scales or soft caps where they have the same heads.")
    return tuple(layers)


def _make_checked(causal: Any, config: TransformersConfig) -> TransformersModel:
    """Returns the model with paged attention. Raises ``ModelError`` if its logits differ from transformers' own
    attention.
    """
    sequences = sample_sequences(config.vocab_size, config.max_length)
    expected = [reference_logits(causal, tokens) for tokens in sequences]
    model = TransformersModel(causal)
    check_paged_logits(model, sequences, expected)
    return model


def load_weights(config: Any, folder: Path, checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """Returns a transformers ``config.model_class`` with the weights of ``checkpoint``. Raises ``ModelError``."""
    try:
        with _without_progress_bar():
            causal, report = config.model_class.from_pretrained(
                None,  # no folder: everything that transformers would read there is passed
                config=config.hf_config,
                state_dict=lazy_state_dict(checkpoint, dtype),
                dtype=dtype,
                output_loading_info=True,
            )
    except Exception as error:  # noqa: BLE001 - any error means that there is no model
        raise ModelError(f"{folder} cannot be loaded as a {config.architecture}: {one_line(error)}.") from None
    if report["missing_keys"]:
        raise ModelError(f"{folder} has no tensor {min(report['missing_keys'])}.")
    unused = sorted(report["unexpected_keys"])
    if unused:
        log.warning("%s has %d tensors that the model does not use: %s", folder, len(unused), ", ".join(unused[:5]))
    return causal


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Turns off transformers' progress bar, which would garble the log."""
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def register_attention() -> None:
    """Registers both attention functions with transformers, under their own names."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PAGED_ATTENTION, paged_attention)
    AttentionInterface.register(PROBE_ATTENTION, probe_attention)
    AttentionMaskInterface.register(PROBE_ATTENTION, _probe_mask)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: object,
    quire_step: PagedAttentionContext,
    s_aux: torch.Tensor | None = None,
    **__: object,
) -> AttentionOutput:
    """Computes attention in paged memory: ``query`` and ``key`` [1, (kv_)heads, T, head_dim], ``value`` [1, kv_heads,
    T, value_dim] -> [1, T, heads, value_dim]. ``s_aux`` are attention sinks, as transformers calls them.

    Rows of KV memory have one size. If keys and values differ in size, the smaller ones are padded with zeros, which
    change no scores and not the first ``value_dim`` numbers of a result. Attention functions without a mask function of
    the same name get no mask from transformers. None is needed, because the attention backend has the bounds of the
    sequences.
    """
    index, size = module.layer_idx, value.shape[-1]
    layer, kv = quire_step.layers[index]
    query, key, value = (_rows(tensor, layer.head_dim) for tensor in (query, key, value))
    mixed = layer(query, key, value, kv, quire_step.attention, sinks=s_aux)
    return mixed[None, :, :, :size], None


def _rows(heads: torch.Tensor, size: int) -> torch.Tensor:
    """Returns [1, heads, T, n] as rows [T, heads, size], padded with zeros."""
    rows = heads[0].transpose(0, 1)
    return rows if rows.shape[-1] == size else pad(rows, (0, size - rows.shape[-1]))


def probe_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    quire_probe: AttentionProbe | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> AttentionOutput:
    """Records what the layer requires, and returns zeros. Raises ``ModelError`` if no backend supports it."""
    if quire_probe is None:
        raise ModelError("Its layers do not hand on what their attention is called with.")
    _check_extra_arguments(others)
    if value.shape[:-1] != key.shape[:-1]:
        raise ModelError("It has other heads of keys than of values.")
    if s_aux is not None and (softcap is not None or s_aux.shape != query.shape[1:2]):
        raise ModelError("It has sinks and a soft cap, or not one sink a head, which the attention backends cannot do.")
    if not query.dtype == key.dtype == value.dtype:
        raise ModelError("Its queries, keys and values are of different types.")
    _, heads, tokens, size = query.shape
    layer = LayerAttention(
        num_heads=heads,
        num_kv_heads=key.shape[1],
        head_dim=max(size, value.shape[-1]),
        scale=size**-0.5 if scaling is None else float(scaling),
        window=sliding_window_of(attention_mask),
        soft_cap=softcap,
    )
    quire_probe.add(module.layer_idx, layer, key)
    return query.new_zeros(1, tokens, heads, value.shape[-1]), None


def _check_extra_arguments(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is not None and name not in IGNORED_ARGUMENTS and not (name == "is_causal" and value):
            raise ModelError(f"Its attention asks for {name}, which the attention backends cannot do.")


def _probe_mask(*, mask_function: Callable[..., torch.Tensor], config: Any, **_: object) -> torch.Tensor:
    """Returns the mask of the ``probed_positions`` over all keys, [1, 1, rows, keys], for ``sliding_window_of``."""
    keys = max_sequence_length(config)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    mask = mask_function(zero, zero, probed_positions(keys)[:, None], torch.arange(keys))
    return torch.as_tensor(mask).expand(1, 1, len(probed_positions(keys)), keys)


def sliding_window_of(mask: torch.Tensor | None) -> int | None:
    """Returns the number of latest tokens that a token attends to, including itself; None for all. Raises
    ``ModelError`` if the mask is not causal or a causal window.
    """
    if mask is None or not _is_probe_mask(mask):
        raise ModelError("Its attention has a mask of its own making, which the attention backends do not know.")
    keys, seen = torch.arange(mask.shape[-1]), mask[0, 0]
    window = int(seen[-1].sum())
    distance = probed_positions(len(keys))[:, None] - keys
    if not torch.equal(seen, (distance >= 0) & (distance < window)):
        raise ModelError("Its attention is not causal, and not causal within a window of the latest tokens.")
    return None if window == len(keys) else window


def _is_probe_mask(mask: torch.Tensor) -> bool:
    """Whether ``mask`` has the dtype and shape that ``_probe_mask`` makes."""
    return bool(mask.dtype == torch.bool and mask.dim() == 4 and len(probed_positions(mask.shape[3])) == mask.shape[2])


def probed_positions(keys: int) -> torch.Tensor:
    """Returns positions at the beginning, in the middle and at the end of ``keys`` positions. Only a window looks like
    a window from all of them. Chunked attention, for example, does not: the last two positions cannot both be equally
    far from the start of their chunk.
    """
    return torch.tensor(sorted({0, min(1, keys - 1), keys // 3, keys // 2, max(0, keys - 2), keys - 1}))
