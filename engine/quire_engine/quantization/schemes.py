"""The quantisation schemes by name."""

from collections.abc import Callable, Mapping

import torch

from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import Quantization
from quire_engine.errors import ModelError
from quire_engine.quantization.base import Linear, QuantizationConfig
from quire_engine.quantization.int8 import Int8Method
from quire_engine.quantization.unquantized import UnquantizedMethod

Scheme = Callable[[LoadOptions, torch.dtype], QuantizationConfig]


def _unquantized(options: LoadOptions, dtype: torch.dtype) -> QuantizationConfig:
    plain = UnquantizedMethod(options, dtype)
    return QuantizationConfig(plain, plain, plain)


def _int8(options: LoadOptions, dtype: torch.dtype) -> QuantizationConfig:
    int8 = Int8Method(options, dtype)
    return QuantizationConfig(int8, int8, UnquantizedMethod(options, dtype))


SCHEMES: Mapping[Quantization | None, Scheme] = {None: _unquantized, "int8": _int8}


def make_quantization(options: LoadOptions, dtype: torch.dtype) -> QuantizationConfig:
    """What ``options`` say that layers are held in, for a model of ``dtype``."""
    return SCHEMES[options.config.quantization](options, dtype)


def check_quantization(options: LoadOptions) -> None:
    """Raises ``ModelError`` where the quantization of ``options`` does not run on their device."""
    devices = make_quantization(options, torch.float32).linear.devices
    if options.device.type not in devices:
        raise ModelError(
            f"The quantization {options.config.quantization} is for the CPU, and the device is {options.device}."
        )


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, options: LoadOptions) -> Linear:
    """The layer of ``weight`` [out, in] and ``bias`` [out], held as ``options`` say. Raises ``ModelError``."""
    return make_quantization(options, weight.dtype).linear.pack(weight, bias)
