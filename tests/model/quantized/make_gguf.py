"""Makes the GGUF files beside this file, and what llama.cpp's libraries and transformers make of them.

    python -m tests.model.quantized.make_gguf
    python -m tests.model.quantized.make_gguf MODEL FOLDER [Q8_0 ...]

Needs gguf and llama-cpp-python. The first writes the files of the tests. llama.gguf is written by the library gguf,
which can quantise older types alone; the others are quantised by llama.cpp itself (``llama_model_quantize``), whole, to
the kinds of files that it publishes. Each NAME.gguf gets a NAME.expected.safetensors: a prompt, and the tokens that
transformers generates in float32 from the file, which llama.cpp generates as well. blocks.safetensors has random blocks
of every type, so that every bit is set somewhere, and the numbers that gguf makes of them.

The second has llama.cpp quantise a folder of transformers, such as demo/model: tests/bench/checkpoint_perplexity.py
measures such files.
"""

import ctypes
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
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
# Types with a K need rows of 256.
WIDE = SIZES | {"hidden_size": 256, "initializer_range": 0.15}
# Of each model: its class, its configuration, and the type of each matrix, or else the kind of file that llama.cpp is
# to make of it and the type of its embedding. Of two layers a Q4_K_M file has values and down projections of one in
# Q6_K.
MODELS = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, rope_parameters=LLAMA3),
        {"attn_q": "Q8_0", "attn_k": "Q4_0", "attn_v": "Q5_0", "attn_output": "Q4_1", "ffn_gate": "Q8_0"}
        | {"ffn_up": "Q5_1", "ffn_down": "Q4_0", "token_embd": "Q8_0", "output": "F16"},
    ),
    "llama-q4_k_m": (LlamaForCausalLM, LlamaConfig(**WIDE | {"num_hidden_layers": 2}), ("Q4_K_M", None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**WIDE, tie_word_embeddings=True), ("Q5_K_M", "F16")),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**WIDE, head_dim=32, tie_word_embeddings=True), ("Q6_K", "BF16")),
}
# Where the fp16 numbers of a block are, and what they may be, so that its numbers are of a model's size.
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
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
FTYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")


def random_blocks(kind: str, rows: int, random: np.random.Generator) -> np.ndarray:
    """uint8 [rows, bytes], a block each: all bytes are random but for the halves."""
    blocks = random.integers(0, 256, (rows, gguf.GGML_QUANT_SIZES[Kind[kind]][1]), dtype=np.uint8)
    for begin, most in HALVES[kind].items():
        halves = (random.uniform(0.2, 1, rows) * most).astype(np.float16)
        blocks[:, begin : begin + 2] = halves[:, None].view(np.uint8)
    return blocks


def make_blocks() -> None:
    random, made = np.random.default_rng(0), {}
    for kind in HALVES:
        blocks = random_blocks(kind, 4, random)
        made[f"{kind}.blocks"] = torch.from_numpy(blocks)
        made[f"{kind}.numbers"] = torch.from_numpy(gguf.dequantize(blocks, Kind[kind]))
    save_file(made, HERE / "blocks.safetensors")


def permuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's convert_hf_to_gguf.py stores the queries and keys of the architecture llama."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def write(model: PreTrainedModel, path: Path, kinds: dict[str, str]) -> None:
    """The file of a model; matrices that ``kinds`` does not name are in float32."""
    config, architecture = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{index}" for index in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([1] * config.vocab_size)
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config.num_hidden_layers)
    for stored, plain in model.state_dict().items():
        if stored == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        kind = kinds.get(target.split(".")[-2], "F32") if plain.dim() > 1 else "F32"
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stored.split(".")[-2])
        tensor = permuted(plain, heads) if architecture == "llama" and heads else plain
        data = gguf.quantize(tensor.float().contiguous().numpy(), Kind[kind])
        writer.add_tensor(target, data, raw_dtype=Kind[kind])
    if config.rope_parameters["rope_type"] == "llama3":
        plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_quantized(model: PreTrainedModel, path: Path, ftype: str, embedding: str | None = None) -> None:
    """The file that llama.cpp makes of the model in float32, and the type of its embedding, as ``llama-quantize`` and
    its ``--token-embedding-type`` do.
    """
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.gguf"
        write(model, plain, {})
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{ftype}")
        if embedding is not None:
            params.token_embedding_type = int(Kind[embedding])
        if llama_cpp.llama_model_quantize(str(plain).encode(), str(path).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp cannot make {path}")


def oracle(path: Path, model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config, dtype=torch.float32)
    model = model_class(config)
    model.load_state_dict(read.state_dict())
    return model.eval()


class LlamaCpp:
    """llama.cpp, one thread, one sequence, KV in float32."""

    def __init__(self, path: Path) -> None:
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = 128, 1, 1
        params.type_k = params.type_v = int(Kind.F32)
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def generate(self, prompt: list[int], count: int) -> list[int]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        made, tokens = [], prompt
        while len(made) < count:
            given = (ctypes.c_int32 * len(tokens))(*tokens)  # which a batch only points to
            batch = llama_cpp.llama_batch_get_one(given, len(tokens))
            if llama_cpp.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed")
            logits = llama_cpp.llama_get_logits_ith(self._context, -1)
            tokens = [int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())]
            made += tokens
        return made


def make(name: str) -> None:
    path, (model_class, config, kinds) = HERE / f"{name}.gguf", MODELS[name]
    torch.manual_seed(7)
    if isinstance(kinds, dict):
        write(model_class(config), path, kinds)
    else:
        write_quantized(model_class(config), path, *kinds)
    model = oracle(path, model_class, config)
    random = torch.Generator().manual_seed(2)
    prompts = torch.randint(2, 64, (2048, 12), generator=random)
    made = model.generate(prompts, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        best = model(made).logits[:, prompts.shape[1] - 1 : -1].topk(2).values
    margins = (best[..., 0] - best[..., 1]).amin(1)
    made = made[:, prompts.shape[1] :]
    kinds_of_tokens = torch.tensor([len(set(row)) for row in made.tolist()])
    peer, tried = LlamaCpp(path), 0
    # Of the prompts with many kinds of tokens, the one whose tokens win by most that llama.cpp continues alike: it and
    # the engine round activations to eight bits.
    for chosen in (margins * (kinds_of_tokens >= 12)).argsort(descending=True, stable=True).tolist():
        tried += 1
        if peer.generate(prompts[chosen].tolist(), 24) == made[chosen].tolist():
            break
    else:
        raise RuntimeError(f"llama.cpp makes other tokens of {path}")
    several, margin = int(kinds_of_tokens[chosen]), float(margins[chosen])
    print(f"{name}: {several} tokens, smallest margin of logits {margin:.3f}, prompt {tried} in order")
    facts = {"prompt": prompts[chosen].contiguous(), "tokens": made[chosen].contiguous()}
    save_file(facts, HERE / f"{name}.expected.safetensors")


@llama_cpp.llama_log_callback
def keep_quiet(_level: int, _text: bytes, _data: object) -> None:
    pass


if __name__ == "__main__":
    llama_cpp.llama_log_set(keep_quiet, ctypes.c_void_p())
    if len(sys.argv) == 1:
        make_blocks()
        for each in MODELS:
            make(each)
    else:
        source, target, *ftypes = sys.argv[1:]
        whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        Path(target).mkdir(exist_ok=True)
        for each in ftypes or FTYPES:
            write_quantized(whole, Path(target) / f"{each}.gguf", each)
