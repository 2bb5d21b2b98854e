"""llama.cpp through the low-level calls of llama-cpp-python: prompts in batches of whole ones, then one batch a step
for all sequences that are not done, over one unified KV cache. The weights are written as a GGUF file first, which
llama.cpp itself quantises where fewer bits are asked for.
"""

import ctypes
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lines  # type: ignore[import-not-found] # beside this script

LEAST_BATCH = 2048
KV_TOKENS = 1 << 16
# llama.cpp's numbers of the kinds of quantised files (enum llama_ftype).
FTYPES = {"q4_k_m": 15, "q8_0": 7}
# Token, position, sequence, and whether a next token is taken.
Entry = tuple[int, int, int, bool]


def main() -> None:
    """Serves until there are no more workloads."""
    answers, settings = lines.take_output(), lines.settings()
    config = json.loads((Path(settings["model"]) / "config.json").read_text())
    if config.get("model_type") != "llama" or config.get("rope_scaling"):
        lines.say(answers, error="Only plain Llama shapes can be given to llama.cpp here.")
        return
    with tempfile.TemporaryDirectory(prefix="quire-gguf-") as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(Path(settings["model"]), config, path, settings["dtype"])
        import llama_cpp  # type: ignore[import-not-found]

        kind = settings.get("ftype")
        if kind:
            path = quantize(llama_cpp, path, kind)
        engine = Engine(llama_cpp, path, settings, config["vocab_size"])
        name = f"llama.cpp (llama-cpp-python {llama_cpp.__version__}){f', {kind}' if kind else ''}"
        lines.serve(answers, name, engine.run)


def write_gguf(folder: Path, config: dict[str, Any], path: Path, dtype: str) -> None:
    """The weights under the names of a GGUF file, queries and keys in llama.cpp's order of rotation."""
    import gguf  # type: ignore[import-not-found]
    import numpy as np
    import torch
    from safetensors.torch import load_file

    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base((config.get("rope_parameters") or config).get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    kind = {"bfloat16": gguf.GGMLQuantizationType.BF16, "float32": gguf.GGMLQuantizationType.F32}[dtype]

    def add(name: str, tensor: Any) -> None:
        if tensor.dim() == 1 or dtype == "float32":
            writer.add_tensor(name, tensor.float().numpy())
        else:
            raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, np.ascontiguousarray(raw), raw_dtype=kind)

    def permuted(tensor: Any, count: int) -> Any:
        halves = tensor.reshape(count, 2, head_dim // 2, tensor.shape[1])
        return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()

    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            rotated = heads if ".q_proj." in name else kv_heads if ".k_proj." in name else 0
            add(gguf_name(name), permuted(tensor, rotated) if rotated else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(library: Any, path: Path, kind: str) -> Path:
    """Replaces the file with one beside it whose weights are quantised."""
    library.llama_backend_init()
    made = path.with_name(f"{kind}.gguf")
    params = library.llama_model_quantize_default_params()
    params.ftype = FTYPES[kind]
    if library.llama_model_quantize(str(path).encode(), str(made).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp cannot quantise this model to {kind}")
    path.unlink()
    return made


def gguf_name(name: str) -> str:
    """``model.layers.3.self_attn.q_proj.weight`` -> ``blk.3.attn_q.weight``."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{parts[rest.removesuffix('.weight')]}.weight"


class Engine:
    """A model and one context of llama.cpp."""

    def __init__(self, library: Any, path: Path, settings: dict[str, Any], vocab_size: int) -> None:
        self.library = library
        self.vocab_size = vocab_size
        library.llama_backend_init()
        model_params = library.llama_model_default_params()
        model_params.n_gpu_layers = 0 if settings["device"] == "cpu" else 999
        self.model = library.llama_model_load_from_file(str(path).encode(), model_params)
        params = library.llama_context_default_params()
        params.n_ctx = settings["max_num_seqs"] * settings["max_model_len"]
        params.n_ctx = min(params.n_ctx, max(KV_TOKENS, settings["max_model_len"]))
        self.size = max(LEAST_BATCH, settings["max_model_len"])
        params.n_batch = params.n_ubatch = self.size
        params.n_seq_max = settings["max_num_seqs"]
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.kv_unified = True
        self.context = library.llama_init_from_model(self.model, params)
        self.batch = library.llama_batch_init(self.size, 0, 1)

    def run(self, prompts: list[list[int]], outputs: list[int], n: int) -> tuple[int, int]:
        """Greedy tokens for all prompts; returns how many were made, and the positions that were computed."""
        if n > 1:
            raise RuntimeError("llama.cpp is given one output for each prompt here")
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
        last: dict[int, int] = {}
        made, places = dict.fromkeys(range(len(prompts)), 0), [len(prompt) for prompt in prompts]
        for group in groups(prompts, self.size):
            entries: list[Entry] = []
            for index in group:
                entries += [
                    (token, place, index, place + 1 == len(prompts[index]))
                    for place, token in enumerate(prompts[index])
                ]
            self.step(entries, last, made)
        while True:
            alive = [index for index in last if made[index] < outputs[index]]
            if not alive:
                return sum(made.values()), lines.needed(prompts, outputs, n)
            self.step([(last[index], places[index], index, True) for index in alive], last, made)
            for index in alive:
                places[index] += 1

    def step(self, entries: list[Entry], last: dict[int, int], made: dict[int, int]) -> None:
        """Computes tokens ``(token, position, sequence, sampled)``, and takes the most probable next ones."""
        import numpy as np

        batch = self.batch
        batch.n_tokens = len(entries)
        for row, (token, place, sequence, sampled) in enumerate(entries):
            batch.token[row], batch.pos[row] = token, place
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = sampled
        if self.library.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        for row, (_, _, sequence, sampled) in enumerate(entries):
            if sampled:
                pointer = self.library.llama_get_logits_ith(self.context, row)
                address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
                last[sequence] = int(np.ctypeslib.as_array(address, (self.vocab_size,)).argmax())
                made[sequence] += 1


def groups(prompts: list[list[int]], most: int) -> Iterator[list[int]]:
    """Indexes of prompts that fit into one batch together."""
    group: list[int] = []
    size = 0
    for index, prompt in enumerate(prompts):
        if group and size + len(prompt) > most:
            yield group
            group, size = [], 0
        group.append(index)
        size += len(prompt)
    yield group


if __name__ == "__main__":
    main()
