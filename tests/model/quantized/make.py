"""Makes the quantised model folders beside this file. Those of GPTQ and compressed-tensors are quantised and saved by
GPTQModel and LLM Compressor, and fp8 by transformers. Of awq AutoAWQ rounds and packs the layers and gives their
numbers, without its search for scales and for where weights are clipped, and the folder is written here. The libraries
are too heavy for the tests, so the folders are kept.

    python -m tests.model.quantized.make [NAME ...]

Needs autoawq, gptqmodel, llmcompressor and accelerate in an environment of their own. Each folder gets an
``expected.safetensors``: what the library makes of one layer in plain numbers, a prompt, and the tokens that
transformers generates in float32 with all layers in such numbers.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).parent
SHOWN = "model.layers.0.self_attn.k_proj"
NEW_TOKENS = 24
Weights = dict[str, torch.Tensor]
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")
LAYERS = [f"model.layers.0.{part}" for part in (*PARTS, "mlp.down_proj")]


def plain_model(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def save_plain(folder: Path, dtype: torch.dtype) -> Path:
    plain_model(dtype).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", pad_token="w1")
    made.save_pretrained(folder)
    return folder


def calibration() -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(2, 64, (48,), generator=random).tolist() for _ in range(16)]


def awq(target: Path, _: Path) -> Weights:
    """AutoAWQ's rounding and packing; its search for scales does not know this transformers, and GPTQModel's asks for
    layers whose outputs are multiples of 64.
    """
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.packing_utils import dequantize_gemm

    model, dequantized = plain_model(torch.float16), {}
    quantizer = AwqQuantizer.__new__(AwqQuantizer)
    quantizer.group_size, quantizer.w_bit, quantizer.zero_point = 32, 4, True
    for name in LAYERS:
        linear = model.get_submodule(name)
        linear.weight.data, scales, zeros = quantizer.pseudo_quantize_tensor(linear.weight.data)
        packed = WQLinear_GEMM.from_linear(linear, 4, 32, False, scales.T.contiguous(), zeros.T.contiguous())
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, packed)
        unpacked = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, 32)
        dequantized[name] = unpacked.T.contiguous()
    save_config(model, target)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, target / "model.safetensors")
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    add_config(target, config | {"modules_to_not_convert": None})
    return dequantized


def gptq(target: Path, plain: Path, **settings: object) -> Weights:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(**{"group_size": 32, "offload_to_disk": False, **settings})
    model = GPTQModel.load(str(plain), config, device="cpu", dtype=torch.float16)
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in calibration()]
    model.quantize(rows, batch_size=4)
    model.save(str(target))
    loaded = GPTQModel.load(str(target), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
    return {name: loaded.model.get_submodule(name).dequantize_weight().T.float().contiguous() for name in LAYERS}


def compressed(target: Path, plain: Path, scheme: object, *, awq: bool = False) -> Weights:
    """LLM Compressor's rounding; with ``awq`` behind its search for AWQ's scales, which go into norms and weights."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    if isinstance(scheme, dict):
        weights = QuantizationArgs(**scheme)
        how = {"config_groups": {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}}
    else:
        how = {"targets": "Linear", "scheme": scheme}
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    rounding = QuantizationModifier(ignore=["lm_head"], **how)
    if awq:
        rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in calibration()]
        # What it keeps between layers it pins for a GPU, and there need not be one.
        with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor):
            oneshot(model=model, recipe=[AWQModifier(), rounding], dataset=Dataset.from_list(rows), max_seq_length=48)
    else:
        oneshot(model=model, recipe=rounding)
    model.save_pretrained(target, save_compressed=True)
    if scheme is ASYMMETRIC:  # transformers 5.23 expects zeros that are not packed
        return unpacked(target, QuantizationScheme(targets=["Linear"], weights=weights))
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        loaded(torch.tensor([[1]]))  # decompresses
    return {name: loaded.get_submodule(name).weight.float() for name in LAYERS}


def unpacked(folder: Path, scheme: object) -> Weights:
    from compressed_tensors.compressors import PackedQuantizationCompressor

    with safe_open(folder / "model.safetensors", "pt") as file:
        parts = {layer: {part: file.get_tensor(f"{layer}.{part}") for part in PACKED} for layer in LAYERS}
    for part in parts.values():
        part["weight_scale"] = part["weight_scale"].float()
    return {layer: PackedQuantizationCompressor.decompress(part, scheme)["weight"] for layer, part in parts.items()}


def fp8(target: Path, plain: Path) -> Weights:
    """transformers' rounding as it loads, and its numbers as it loads what it saved. Blocks of 32: of DeepSeek's and
    Qwen's size, 128, this model would have one a layer.
    """
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    # It asks for a GPU, which products need and rounding does not.
    with mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment"):
        config = FineGrainedFP8Config(weight_block_size=(32, 32))
        model = AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.bfloat16, device_map="cpu", quantization_config=config
        )
        model.save_pretrained(target)
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return {name: loaded.get_submodule(name).weight.detach().float() for name in LAYERS}


PACKED = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
ASYMMETRIC = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
SYMMETRIC = ASYMMETRIC | {"symmetric": True}
EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FOLDERS: dict[str, Callable[[Path, Path], Weights]] = {
    "awq": awq,
    "gptq": lambda target, plain: gptq(target, plain, bits=4, desc_act=False, format="gptq"),
    "gptq-asymmetric": lambda target, plain: gptq(target, plain, bits=4, desc_act=False, sym=False, format="gptq_v2"),
    "gptq-desc-act": lambda target, plain: gptq(target, plain, bits=4, desc_act=True, format="gptq"),
    "gptq-8-bits": lambda target, plain: gptq(target, plain, bits=8, desc_act=False, format="gptq_v2"),
    "w4a16": lambda target, plain: compressed(target, plain, SYMMETRIC),
    "w4a16-asymmetric": lambda target, plain: compressed(target, plain, ASYMMETRIC),
    "w4a16-awq": lambda target, plain: compressed(target, plain, ASYMMETRIC, awq=True),
    "w8a16": lambda target, plain: compressed(target, plain, EIGHT_BITS),
    "w8a8": lambda target, plain: compressed(target, plain, "INT8"),
    "fp8-dynamic": lambda target, plain: compressed(target, plain, "FP8_DYNAMIC"),
    "fp8-tensor": lambda target, plain: compressed(
        target, plain, {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    ),
    "fp8": fp8,
}


def save_config(model: LlamaForCausalLM, folder: Path) -> None:
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)


def add_config(folder: Path, quantization: dict[str, object]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}, indent=1))


def expected_tokens(folder: Path, dequantized: Weights) -> tuple[list[int], list[int]]:
    """A prompt, and what transformers generates in float32 with the plain numbers; all else is as the folder stores it.
    Of many prompts it is the one whose tokens win by most, so that they do not hang on how activations are rounded.
    """
    model = plain_model(torch.float32)
    state = {f"{name}.weight": tensor.float() for name, tensor in dequantized.items()}
    with safe_open(folder / "model.safetensors", "pt") as file:
        state |= {name: file.get_tensor(name).float() for name in model.state_dict() if name not in state}
    model.load_state_dict(state)
    random = torch.Generator().manual_seed(2)
    prompts = torch.randint(2, 64, (256, 8), generator=random)
    made = model.generate(prompts, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        best = model(made).logits[:, prompts.shape[1] - 1 : -1].topk(2).values
    margins = (best[..., 0] - best[..., 1]).amin(1)
    chosen = int(margins.argmax())
    print(f"{folder.name}: smallest margin of logits {float(margins[chosen]):.3f}")
    return prompts[chosen].tolist(), made[chosen, prompts.shape[1] :].tolist()


def make(name: str) -> None:
    target = HERE / name
    with tempfile.TemporaryDirectory() as temporary:
        dtype = torch.float16 if "gptq" in name or name == "awq" else torch.bfloat16
        plain, made = save_plain(Path(temporary) / "plain", dtype), Path(temporary) / "made"
        made.mkdir()
        dequantized = FOLDERS[name](made, plain)
        prompt, tokens = expected_tokens(made, dequantized)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copy(made / file, target)
        facts = {SHOWN: dequantized[SHOWN].float(), "prompt": torch.tensor(prompt), "tokens": torch.tensor(tokens)}
        save_file(facts, target / "expected.safetensors")


if __name__ == "__main__":
    for each in sys.argv[1:] or FOLDERS:
        make(each)
