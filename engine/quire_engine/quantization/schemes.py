"""The quantization schemes: the values of ``--quantization``, applied when plain weights are read, and the formats that
a checkpoint's ``quantization_config`` names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire_engine.checkpoint.stored_schemes import check_stored_scheme, compressed_bits
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import Quantization
from quire_engine.errors import ModelError
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


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """A ``quant_method`` of checkpoints, one of ``STORED_CHECKS``. ``bits`` returns the bits of integer weights.
    ``make`` takes the method for layers that are stored as plain numbers.
    """

    bits: Callable[[StoredConfig], set[int]]
    make: Callable[[LoadOptions, torch.dtype, DenseMethod, StoredConfig], StoredMethod]


STORED_SCHEMES: Mapping[str, StoredScheme] = {
    "awq": StoredScheme(lambda _: {4}, lambda options, dtype, dense, _: AwqMethod(options, dtype, dense)),
    "gptq": StoredScheme(lambda config: {config["bits"]}, GptqMethod),
    "compressed-tensors": StoredScheme(compressed_bits, CompressedTensorsMethod),
    "gguf": StoredScheme(lambda _: set(), lambda options, dtype, dense, _: GgufMethod(options, dtype, dense)),
    "fp8": StoredScheme(lambda _: set(), Fp8Method),
}


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
    method = stored_scheme(stored).make(options, dtype, made.linear, stored)
    head, router = StoredDenseMethod(method, made.head), StoredDenseMethod(method, made.router)
    return QuantizationConfig(method, head, router)


def stored_scheme(config: StoredConfig) -> StoredScheme:
    """Returns the scheme of a quantized checkpoint. Raises ``ModelError`` if it is not supported."""
    check_stored_scheme(config)
    return STORED_SCHEMES[config["quant_method"]]


def check_quantization(options: LoadOptions, stored: StoredConfig | None = None) -> None:
    """Raises ``ModelError`` if the quantization of ``options`` does not run on their device, or differs from the
    checkpoint's.
    """
    name = options.config.quantization
    devices = make_quantization(options, torch.float32).linear.devices
    if options.device.type not in devices:
        raise ModelError(f"The quantization {name} is for the CPU, and the device is {options.device}.")
    bits = set() if stored is None else stored_scheme(stored).bits(stored)
    if name is not None and bits and {f"int{count}" for count in bits} != {name}:
        listed = " and ".join(map(str, sorted(bits)))
        raise ModelError(f"The weights are quantised already, in {listed} bits, which --quantization {name} is not.")


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, options: LoadOptions) -> Linear:
    """Makes the layer of ``weight`` [out, in] and ``bias`` [out], in the format of ``options``. Raises
    ``ModelError``.
    """
    return make_quantization(options, weight.dtype).linear.pack(weight, bias)
