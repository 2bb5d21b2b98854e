"""Loads a model through transformers: its weights, its own logits, and the proof that paged memory changes nothing."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quire_engine.models.errors import ModelError
from quire_engine.models.fallback.attention import register_attention
from quire_engine.models.fallback.check import check_paged_logits, reference_logits, sample_sequences
from quire_engine.models.fallback.config import TransformersConfig
from quire_engine.models.fallback.model import TransformersModel
from quire_engine.models.folder import one_line

log = logging.getLogger(__name__)


def load_transformers_model(
    config: TransformersConfig, folder: Path, dtype: torch.dtype, device: torch.device
) -> TransformersModel:
    """The model of ``folder``. Raises ``ModelError`` for weights that cannot be loaded, and for a model that paged
    attention cannot serve.
    """
    register_attention()
    causal = _load_weights(config, folder, dtype).to(device).eval()
    try:
        with torch.inference_mode():
            return _make_checked(causal, config)
    except ModelError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - what a model does with its input is its own
        reason = f"It does not run: {one_line(error)}."
    raise ModelError(f"{folder} holds a {config.architecture}, which cannot be served. {reason}")


def _make_checked(causal: Any, config: TransformersConfig) -> TransformersModel:
    """The model with paged attention, once it was seen that this changes nothing."""
    sequences = sample_sequences(config.vocab_size, config.max_length)
    expected = [reference_logits(causal, tokens) for tokens in sequences]
    model = TransformersModel(causal)
    check_paged_logits(model, sequences, expected)
    return model


def _load_weights(config: TransformersConfig, folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model with all of its weights, from safetensors files only."""
    try:
        with _without_progress_bar():
            causal, report = config.model_class.from_pretrained(
                folder,
                config=config.hf_config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # noqa: BLE001 - whatever it raises means that there is no model
        raise ModelError(f"{folder} cannot be loaded as a {config.architecture}: {one_line(error)}.") from None
    if report["missing_keys"]:
        raise ModelError(f"{folder} has no tensor {min(report['missing_keys'])}.")
    strange = sorted(report["unexpected_keys"])
    if strange:
        log.warning("%s has %d tensors that the model does not use: %s", folder, len(strange), ", ".join(strange[:5]))
    return causal


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """A log is no place to draw in."""
    from transformers.utils import logging as their_logging

    shown = their_logging.is_progress_bar_enabled()
    their_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            their_logging.enable_progress_bar()
