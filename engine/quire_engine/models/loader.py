"""Loads the model of a folder: with the registry's class for its architecture, or else with transformers' code."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch

from quire_engine.checkpoint.architecture import architecture_of
from quire_engine.checkpoint.config import (
    DecoderConfig,
    ModelConfig,
    config_path,
    is_supported,
    quantization_of,
    read_config_json,
)
from quire_engine.checkpoint.gguf import find_gguf
from quire_engine.checkpoint.gguf_checkpoint import GgufCheckpoint
from quire_engine.checkpoint.pooler_config import is_causal, max_seq_length, read_pooler_config
from quire_engine.checkpoint.stored_schemes import is_dequantized
from quire_engine.checkpoint.support import check_stored_bits, check_support
from quire_engine.checkpoint.weights import Checkpoint, LoadOptions, resolve_dtype
from quire_engine.config import ExecutorConfig
from quire_engine.config.capabilities import CapabilityRow
from quire_engine.layers.weight_loader import WeightLoader
from quire_engine.models.base import Model
from quire_engine.models.decoder import DecoderModel
from quire_engine.models.encoder import EncoderConfig, EncoderModel
from quire_engine.models.registry import ARCHITECTURES, registered_name
from quire_engine.models.transformers_backend import TransformersConfig, TransformersModel


def read_model_config(folder: Path, settings: ExecutorConfig | None = None) -> ModelConfig:
    """Reads and checks ``config.json`` for an engine with these ``settings``. Raises ``ModelError`` if the model cannot
    be served.
    """
    raw, settings = read_config_json(folder), settings or ExecutorConfig()
    check_support(config_path(folder), raw)
    pooler = read_pooler_config(folder, raw, settings)
    supported = is_supported(architecture_of(config_path(folder), raw), raw)
    if supported:
        check_stored_bits(quantization_of(folder, raw), settings.quantization)
    if pooler is None:
        return read_decoder_config(folder) if supported else TransformersConfig.read(folder)
    config: ModelConfig
    if supported:
        config = replace(read_decoder_config(folder), makes_logits=False)
    else:
        config = TransformersConfig.read(folder) if is_causal(raw) else EncoderConfig.read(folder)
    return replace(config, pooler_config=pooler, max_length=max_seq_length(folder, config.max_length))


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Reads the configuration of a native model. Raises ``ModelError``, also for models without."""
    return DecoderConfig.read(
        folder, lambda architecture, path, hf: decoder_class(architecture).config_fields(path, hf)
    )


def decoder_class(architecture: str) -> type[DecoderModel]:
    """Imports the class of an architecture with a native implementation."""
    name = registered_name(architecture)
    assert name is not None, f"{architecture} has no native implementation"
    found: type[DecoderModel] = getattr(import_module(f"quire_engine.models.{ARCHITECTURES[name].module}"), name)
    return found


def model_class(config: ModelConfig) -> type[Model]:
    """Returns the class of the model that ``config`` describes."""
    if config.is_native:
        return decoder_class(config.architecture)
    return TransformersModel if config.is_causal else EncoderModel


def capability_rows(config: ModelConfig) -> Sequence[CapabilityRow]:
    """Returns the rows of the table of capabilities that the model of ``config`` has for what it is and does."""
    return model_class(config).capability_rows(config)


def load_model(
    config: ModelConfig,
    folder: Path,
    options: LoadOptions,
    check: Callable[[torch.dtype], object] | None = None,
) -> Model:
    """Returns the model of ``folder`` with its weights, loaded according to ``options``.

    ``config`` is the folder's ``read_model_config``. ``check`` is called with the model's dtype before the weights are
    read, and may raise ``ModelError`` to refuse it. Raises ``ModelError``.
    """
    quantized = quantization_of(folder, read_config_json(folder))
    if quantized is not None and is_dequantized(config.architecture, quantized):
        quantized = None
    model, gguf = model_class(config), find_gguf(folder)
    checkpoint = Checkpoint(folder) if gguf is None else GgufCheckpoint(gguf, decoder_class(config.architecture).gguf)
    dtype = resolve_dtype(options.config.dtype, model.stored_dtype(checkpoint), options.device)
    if check is not None:
        check(dtype)
    return model.load(config, folder, WeightLoader(checkpoint, dtype, options, quantized))
