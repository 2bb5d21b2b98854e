"""The ``quantization_config`` of quantised checkpoints: which ones are supported, judged by the configuration alone.
``quire_engine.quantization`` reads the weights. Nothing here imports torch.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quire_engine.errors import ModelError

GPTQ_FORMATS = ("gptq", "gptq_v2")
COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)
SUPPORTED_BITS = (4, 8)
DEFAULT_BLOCK = (128, 128)
NUMBERS_A_BYTE = 2  # of MXFP4 weights, which are dequantised when they are loaded


def check_stored_scheme(config: Mapping[str, Any]) -> None:
    """Raises ``ModelError`` for weights that cannot be read."""
    name = config.get("quant_method")
    check = STORED_CHECKS.get(name) if isinstance(name, str) else None
    if check is None:
        raise ModelError(f"The weights are quantised by {name!r}, and read are {', '.join(STORED_CHECKS)}.")
    check(config)


def is_dequantized(architecture: str, config: Mapping[str, Any]) -> bool:
    """Whether the weights are dequantised when they are loaded."""
    return config.get("quant_method") == "mxfp4" and architecture == "GptOssForCausalLM"


def check_awq(config: Mapping[str, Any]) -> None:
    """Raises ``ModelError`` for weights that ``AwqMethod`` cannot read."""
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        raise ModelError(f"The AWQ weights are of version {version!r}, and gemm is read.")
    if config.get("bits", 4) != 4:
        raise ModelError(f"The AWQ weights have {config['bits']!r} bits, and 4 are read.")


def check_gptq(config: Mapping[str, Any]) -> None:
    """Raises ``ModelError`` for weights that ``GptqMethod`` cannot read."""
    if gptq_format(config) not in GPTQ_FORMATS:
        raise ModelError(f"The GPTQ weights have the format {gptq_format(config)!r}, and gptq and gptq_v2 are read.")
    if config.get("bits") not in SUPPORTED_BITS:
        raise ModelError(f"The GPTQ weights have {config.get('bits')!r} bits, and 4 or 8 are read.")


def gptq_format(config: Mapping[str, Any]) -> str:
    """Returns which of GPTQ's formats the weights have."""
    return str(config.get("checkpoint_format") or config.get("format") or "gptq")


def check_compressed_tensors(config: Mapping[str, Any]) -> None:
    """Raises ``ModelError`` for weights that ``CompressedTensorsMethod`` cannot read."""
    for name in (config.get("format", "dense"), *(group.get("format") for group in _groups(config))):
        if name is not None and name not in COMPRESSED_FORMATS:
            listed = ", ".join(COMPRESSED_FORMATS)
            raise ModelError(f"The weights have the compressed-tensors format {name!r}, and read are {listed}.")
    for key in ("sparsity_config", "transform_config"):
        part = config.get(key)
        if part and not (
            isinstance(part, dict) and part.get("format", part.get("config_groups")) in ("dense", {}, None)
        ):
            raise ModelError(f"The compressed-tensors weights have a {key}, which is not read.")
    for weights in compressed_weights(config):
        if weights.get("num_bits") not in SUPPORTED_BITS:
            raise ModelError(f"The compressed-tensors weights have {weights.get('num_bits')!r} bits; 4 or 8 are read.")
        if weights.get("block_structure"):
            block_size(weights["block_structure"])


def compressed_bits(config: Mapping[str, Any]) -> set[int]:
    """Returns the bits of integer weights; empty for float8."""
    return {weights["num_bits"] for weights in compressed_weights(config) if weights.get("type", "int") == "int"}


def stored_bits(config: Mapping[str, Any]) -> set[int]:
    """Returns the bits of weights that are stored as whole numbers; empty if they are stored otherwise."""
    bits = _BITS.get(config["quant_method"])
    return set() if bits is None else bits(config)


def compressed_weights(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the weight settings of each group of a compressed-tensors configuration."""
    yield from (group["weights"] for group in _groups(config) if isinstance(group.get("weights"), dict))


def _groups(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    groups = config.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ModelError("The compressed-tensors config_groups are not an object of objects.")
    yield from groups.values()


def check_fp8(config: Mapping[str, Any]) -> None:
    """Raises ``ModelError`` for weights that ``Fp8Method`` cannot read."""
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"The fp8 weights have the format {config['fmt']!r}, and e4m3 is read.")
    block_size(config.get("weight_block_size") or list(DEFAULT_BLOCK))


def block_size(stored: object) -> tuple[int, int]:
    """Returns the rows and columns of a block from a configuration. Raises ``ModelError``."""
    if isinstance(stored, list) and len(stored) == 2 and all(isinstance(size, int) and size > 0 for size in stored):
        return stored[0], stored[1]
    raise ModelError(f"The blocks of scales have the size {stored!r}, which is not two whole numbers above 0.")


STORED_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "awq": check_awq,
    "gptq": check_gptq,
    "compressed-tensors": check_compressed_tensors,
    "gguf": lambda _: None,
    "fp8": check_fp8,
}
"""The supported values of ``quant_method``, each with a check that raises ``ModelError`` for unsupported
configurations.
"""
_BITS: Mapping[str, Callable[[Mapping[str, Any]], set[int]]] = {
    "awq": lambda _: {4},
    "gptq": lambda config: {config["bits"]},
    "compressed-tensors": compressed_bits,
}
