"""The ``quantization_config`` of checkpoints that are quantised already: which are read, as their configurations alone
say. ``quire_engine.quantization`` reads the weights; nothing here imports torch.
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
NUMBERS_A_BYTE = 2  # of weights in MXFP4, which are held as plain numbers


def check_stored_scheme(config: Mapping[str, Any]) -> None:
    """Raises ``ModelError`` for weights that are not read."""
    name = config.get("quant_method")
    check = STORED_CHECKS.get(name) if isinstance(name, str) else None
    if check is None:
        raise ModelError(f"The weights are quantised by {name!r}, and read are {', '.join(STORED_CHECKS)}.")
    check(config)


def is_dequantized(architecture: str, config: Mapping[str, Any]) -> bool:
    """Whether the weights of a model that runs through transformers are made plain numbers when they are loaded."""
    return config.get("quant_method") == "mxfp4" and architecture == "GptOssForCausalLM"


def check_awq(config: Mapping[str, Any]) -> None:
    """Raises ``ModelError`` for what ``AwqMethod`` does not read."""
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        raise ModelError(f"The AWQ weights are of version {version!r}, and gemm is read.")
    if config.get("bits", 4) != 4:
        raise ModelError(f"The AWQ weights have {config['bits']!r} bits, and 4 are read.")


def check_gptq(config: Mapping[str, Any]) -> None:
    """Raises ``ModelError`` for what ``GptqMethod`` does not read."""
    if gptq_format(config) not in GPTQ_FORMATS:
        raise ModelError(f"The GPTQ weights have the format {gptq_format(config)!r}, and gptq and gptq_v2 are read.")
    if config.get("bits") not in SUPPORTED_BITS:
        raise ModelError(f"The GPTQ weights have {config.get('bits')!r} bits, and 4 or 8 are read.")


def gptq_format(config: Mapping[str, Any]) -> str:
    """Which of GPTQ's forms the weights have."""
    return str(config.get("checkpoint_format") or config.get("format") or "gptq")


def check_compressed_tensors(config: Mapping[str, Any]) -> None:
    """Raises ``ModelError`` for what ``CompressedTensorsMethod`` does not read."""
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
    """The bits of the weights in whole numbers; none for float8."""
    return {weights["num_bits"] for weights in compressed_weights(config) if weights.get("type", "int") == "int"}


def stored_bits(config: Mapping[str, Any]) -> set[int]:
    """Returns the bits of weights that are stored as whole numbers; none if they are stored otherwise."""
    bits = _BITS.get(config["quant_method"])
    return set() if bits is None else bits(config)


def compressed_weights(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What the groups of a compressed-tensors configuration say of their weights."""
    yield from (group["weights"] for group in _groups(config) if isinstance(group.get("weights"), dict))


def _groups(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    groups = config.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ModelError("The compressed-tensors config_groups are not an object of objects.")
    yield from groups.values()


def check_fp8(config: Mapping[str, Any]) -> None:
    """Raises ``ModelError`` for what ``Fp8Method`` does not read."""
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"The fp8 weights have the format {config['fmt']!r}, and e4m3 is read.")
    block_size(config.get("weight_block_size") or list(DEFAULT_BLOCK))


def block_size(stored: object) -> tuple[int, int]:
    """The rows and columns of a block, as a configuration has them. Raises ``ModelError``."""
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
"""The values of ``quant_method`` that are read, with what raises ``ModelError`` for configurations that are not."""
_BITS: Mapping[str, Callable[[Mapping[str, Any]], set[int]]] = {
    "awq": lambda _: {4},
    "gptq": lambda config: {config["bits"]},
    "compressed-tensors": compressed_bits,
}
