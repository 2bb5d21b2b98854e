"""The quantization schemes: the values of ``--quantization``, applied when plain weights are read, and the formats that
a checkpoint's ``quantization_config`` names.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from quire_engine.checkpoint.stored_schemes import check_stored_scheme
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import Quantization
from quire_engine.quantization.awq import AwqMethod
from quire_engine.quantization.base import DenseMethod, Linear, QuantizationConfig
from quire_engine.quantization.compressed_tensors import CompressedTensorsMethod
from quire_engine.quantization.fp8 import Fp8Method
from quire_engine.quantization.gguf_linear import GgufMethod
from quire_engine.quantization.gptq import GptqMethod
from quire_engine.quantization.int4 import Int4Method
from quire_engine.quantization.int8 import Int8Method, Int8TableMethod
from quire_engine.quantization.stored import StoredDenseMethod, StoredMethod
from quire_engine.quantization.unquantized import UnquantizedMethod

Scheme = Callable[[LoadOptions, torch.dtype], QuantizationConfig]
StoredConfig = dict[str, Any]
"""A checkpoint's ``quantization_config``."""


def _unquantized(options: LoadOptions, dtype: torch.dtype) -> QuantizationConfig:
    plain = UnquantizedMethod(options, dtype)
    return QuantizationConfig(plain, plain, plain)


def _int8(options: LoadOptions, dtype: torch.dtype) -> QuantizationConfig:
    int8 = Int8Method(options, dtype)
    return QuantizationConfig(int8, int8, UnquantizedMethod(options, dtype))


def _int4(options: LoadOptions, dtype: torch.dtype) -> QuantizationConfig:
    return QuantizationConfig(
        Int4Method(options, dtype), Int8TableMethod(options, dtype), UnquantizedMethod(options, dtype)
    )


SCHEMES: Mapping[Quantization | None, Scheme] = {None: _unquantized, "int8": _int8, "int4": _int4}


StoredScheme = Callable[[LoadOptions, torch.dtype, DenseMethod, StoredConfig], StoredMethod]
"""Makes a method for a ``quant_method`` of checkpoints, with the method that holds layers in plain numbers."""

STORED_SCHEMES: Mapping[str, StoredScheme] = {
    "awq": lambda options, dtype, dense, _: AwqMethod(options, dtype, dense),
    "gptq": GptqMethod,
    "compressed-tensors": CompressedTensorsMethod,
    "gguf": lambda options, dtype, dense, _: GgufMethod(options, dtype, dense),
    "fp8": Fp8Method,
}
"""The schemes of ``STORED_CHECKS``, which are read."""


def make_quantization(
    options: LoadOptions, dtype: torch.dtype, stored: StoredConfig | None = None
) -> QuantizationConfig:
    """Makes the methods for the layers of a model of ``dtype``, from ``options`` and the checkpoint's ``stored``
    config.
    """
    made = SCHEMES[options.config.quantization](options, dtype)
    if stored is None:
        return made
    assert isinstance(made.linear, DenseMethod)
    method = stored_scheme(stored)(options, dtype, made.linear, stored)
    head, router = StoredDenseMethod(method, made.head), StoredDenseMethod(method, made.router)
    return QuantizationConfig(method, head, router)


def stored_scheme(config: StoredConfig) -> StoredScheme:
    """Returns the scheme of a checkpoint. Raises ``ModelError`` if it is not read."""
    check_stored_scheme(config)
    return STORED_SCHEMES[config["quant_method"]]


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, options: LoadOptions) -> Linear:
    """Makes the layer of ``weight`` [out, in] and ``bias`` [out], in the format of ``options``. Raises
    ``ModelError``.
    """
    return make_quantization(options, weight.dtype).linear.pack(weight, bias)
