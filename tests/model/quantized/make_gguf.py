"""Makes the GGUF files beside this file with the library gguf of llama.cpp, and what that library and transformers make
of them.

    python -m tests.model.quantized.make_gguf

Needs gguf. Each NAME.gguf gets a NAME.expected.safetensors: a prompt, and the tokens that transformers generates in
float32 from the file. blocks.safetensors has random blocks of every type, and the numbers that gguf makes of them.
"""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Of each model: its class, its configuration, and the type of each matrix. Types with a K need rows of 256.
MODELS = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, rope_parameters=LLAMA3),
        {"attn_q": "Q8_0", "attn_k": "Q4_0", "attn_v": "Q5_0", "attn_output": "Q4_1", "ffn_gate": "Q8_0"}
        | {"ffn_up": "Q5_1", "ffn_down": "Q4_K", "token_embd": "Q8_0", "output": "F16"},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True), {"ffn_down": "Q5_K", "": "F16"}),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
        {"ffn_down": "Q6_K", "": "BF16"},
    ),
}
# Where the fp16 numbers of a block are, and what they may be, so that the weights are of the model's size.
HALVES = {
    "Q4_K": {0: 6e-4, 2: 4e-3},
    "Q5_K": {0: 3e-4, 2: 4e-3},
    "Q6_K": {208: 1e-4},
    "Q4_0": {0: 0.1},
    "Q4_1": {0: 0.1, 2: 0.3},
    "Q5_0": {0: 0.1},
    "Q5_1": {0: 0.1, 2: 0.3},
    "Q8_0": {0: 0.1},
}


def random_blocks(kind: str, shape: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """uint8 [rows, bytes]: all bytes are random but for the halves."""
    numbers, nbytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = random.integers(0, 256, (shape[0], shape[1] // numbers, nbytes), dtype=np.uint8)
    for begin, most in HALVES[kind].items():
        halves = (random.uniform(0.2, 1, blocks.shape[:2]) * most).astype(np.float16)
        blocks[..., begin : begin + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def make_blocks() -> None:
    random, made = np.random.default_rng(0), {}
    for kind in HALVES:
        blocks = random_blocks(kind, (4, gguf.GGML_QUANT_SIZES[Kind[kind]][0]), random)
        made[f"{kind}.blocks"] = torch.from_numpy(blocks)
        made[f"{kind}.numbers"] = torch.from_numpy(gguf.dequantize(blocks, Kind[kind]))
    save_file(made, HERE / "blocks.safetensors")


def permuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's convert_hf_to_gguf.py stores the queries and keys of the architecture llama."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def write(name: str, path: Path) -> None:
    model_class, config, kinds = MODELS[name]
    torch.manual_seed(7)
    model, random = model_class(config), np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"w{index}" for index in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(ARCHITECTURES[name], 1)
    for stored, plain in model.state_dict().items():
        if stored == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        kind = kinds.get(target.split(".")[-2], kinds.get("", "F32")) if plain.dim() > 1 else "F32"
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stored.split(".")[-2])
        tensor = permuted(plain, heads) if name == "llama" and heads else plain
        if kind.endswith("_K"):
            data = random_blocks(kind, tuple(tensor.shape), random)
        else:
            data = gguf.quantize(tensor.float().numpy(), Kind[kind])
        writer.add_tensor(target, data, raw_dtype=Kind[kind])
    if name == "llama":
        plain = 10000.0 ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}


def oracle(name: str, path: Path) -> PreTrainedModel:
    model_class, config, _ = MODELS[name]
    read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config, dtype=torch.float32)
    model = model_class(config)
    model.load_state_dict(read.state_dict())
    return model.eval()


def make(name: str) -> None:
    path = HERE / f"{name}.gguf"
    write(name, path)
    model = oracle(name, path)
    random = torch.Generator().manual_seed(2)
    prompts = torch.randint(2, 64, (2048, 12), generator=random)
    made = model.generate(prompts, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        best = model(made).logits[:, prompts.shape[1] - 1 : -1].topk(2).values
    margins = (best[..., 0] - best[..., 1]).amin(1)
    kinds = torch.tensor([len(set(row)) for row in made[:, prompts.shape[1] :].tolist()])
    chosen = int((kinds * (margins > 0.05)).argmax())
    print(f"{name}: {int(kinds[chosen])} tokens, smallest margin of logits {float(margins[chosen]):.3f}")
    facts = {"prompt": prompts[chosen], "tokens": made[chosen, prompts.shape[1] :]}
    save_file({key: value.contiguous() for key, value in facts.items()}, HERE / f"{name}.expected.safetensors")


if __name__ == "__main__":
    make_blocks()
    for each in MODELS:
        make(each)
