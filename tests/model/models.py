"""Small random models of every architecture, written by transformers, and what transformers generates with them.

Weights are float32 with an init range of 0.3, so that logits are far apart and greedy output does not hang on the last
bit. Everything is seeded: the same name makes the same folder.
"""

import json
import os
import random
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from filelock import FileLock
from quire_engine.models.registry import ARCHITECTURES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 256
NUM_PROMPTS = 20
OUTPUT_TOKENS = 40
# The type and the special fields of each configuration. A new row goes to the end: weights, and the schedules that a
# model always runs with, follow from its place.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": (
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-linear": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": 24, "num_hidden_layers": 3}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "sliding_window": 20,
            "attn_logit_softcapping": 5.0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    # Global layers have other heads than local ones, and the last two layers read the keys and values of two others.
    "gemma4": (
        "gemma4_text",
        {
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    # Latent attention: keys of 24 numbers, and values of 16.
    "deepseek-v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 48,
        },
    ),
    # Layers with a state: gated delta nets, and short convolutions.
    "qwen3.5": (
        "qwen3_5_text",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "gpt-neox": ("gpt_neox", {"num_key_value_heads": 4}),
    "gpt2": ("gpt2", {"num_key_value_heads": 4}),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 2.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.7,
        },
    ),
    "olmo2": ("olmo2", {}),
    "smollm3": (
        "smollm3",
        {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 20},
    ),
}
NAMES = tuple(CONFIGS)
# Rows of KV memory for each token, and the numbers of a row, where not all layers have what the configuration says.
ROWS = {
    "gemma4": ((2 * 2 * 2, 16), (2 * 1 * 1, 32)),
    "deepseek-v3": ((2 * 3 * 4, 24),),
    "qwen3.5": ((2 * 1 * 2, 32),),
    "lfm2": ((2 * 1 * 2, 16),),
}
# Bytes of the state of two layers, in float32: a convolution over the last 4 of 2 * 2 * 16 + 4 * 16 numbers and 4
# matrices of 16 * 16; a convolution over the last 3 of 64 numbers.
STATES = {"qwen3.5": 2 * 4 * (4 * 128 + 4 * 16 * 16), "lfm2": 2 * 4 * 3 * 64}
MODEL_TYPES = {own.model_type for own in ARCHITECTURES.values()}
OWN = tuple(name for name, (model_type, _) in CONFIGS.items() if model_type in MODEL_TYPES)
# Those of OWN that differ in more than the rotation of their heads.
FAMILIES = tuple(name for name in OWN if name not in ("llama-dynamic", "qwen2-yarn"))
# Those that run as transformers' own classes.
FALLBACK = tuple(name for name in NAMES if name not in OWN)
SHARDED = ("llama3", "qwen3")
# Those with layers that give up the KV blocks which their window has left.
WINDOWED = tuple(name for name, (_, special) in CONFIGS.items() if "sliding_window" in special)
# Those whose experts are written as transformers holds them, instead of as they are published.
STACKED = ("qwen3-moe",)


class SmallModels:
    """Folders and greedy outputs of the small models, made when first asked for and kept in the folder ``tmp``, for all
    processes that have it.
    """

    def __init__(self, tmp: Path) -> None:
        self._tmp = tmp
        self._folders: dict[str, Path] = {}
        self._outputs: dict[tuple[str, int], list[int]] = {}
        self.prompts = small_prompts()

    def folder(self, name: str) -> Path:
        if name not in self._folders:
            folder = self._tmp / name
            with FileLock(f"{folder}.lock"):
                if not folder.exists():
                    small_model(name, Path(mkdtemp(dir=self._tmp))).rename(folder)
            self._folders[name] = folder
        return self._folders[name]

    def outputs(
        self, name: str, which: Iterable[int] = range(NUM_PROMPTS), tokens: int = OUTPUT_TOKENS
    ) -> list[list[int]]:
        """The ``tokens`` that transformers generates after each of ``prompts``, or after those of ``which``."""
        which = list(which)
        if missing := [number for number in which if len(self._known(name, number)) < tokens]:
            made = greedy_oracle(self.folder(name), [self.prompts[number] for number in missing], tokens)
            for number, known in zip(missing, made, strict=True):
                file = self._file(name, number)
                part = file.with_suffix(f".{os.getpid()}")
                part.write_text(json.dumps(known))
                part.replace(file)
                self._outputs[name, number] = known
        return [self._outputs[name, number][:tokens] for number in which]

    def _known(self, name: str, number: int) -> list[int]:
        """As many tokens as a process has found before."""
        if (name, number) not in self._outputs and self._file(name, number).exists():
            self._outputs[name, number] = json.loads(self._file(name, number).read_text())
        return self._outputs.get((name, number), [])

    def _file(self, name: str, number: int) -> Path:
        return self._tmp / f"{name}-{number}.json"


def small_model(name: str, tmp: Path, **changes: Any) -> Path:
    """Writes the model called ``name`` (one of ``NAMES``) into a folder under ``tmp``, in one file or several, with
    ``changes`` of its configuration.
    """
    model_type, special = CONFIGS[name]
    config = AutoConfig.for_model(
        model_type,
        **{
            "architectures": None,
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,
            "eos_token_id": 2,
            "bos_token_id": None,
            "pad_token_id": None,
            **special,
            **changes,
        },
    )
    torch.manual_seed(NAMES.index(name))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _spread_constants(model)
    folder = tmp / name
    model.save_pretrained(
        folder,
        max_shard_size="100KB" if name in SHARDED else "1GB",
        save_original_format=name not in STACKED,
    )
    return folder


def tight(folder: Path, blocks: int) -> int:
    """So many KV blocks as put the model under the pressure that others are under in ``blocks``."""
    return blocks // 2 if folder.name in WINDOWED else blocks


def small_prompts(count: int = NUM_PROMPTS) -> list[list[int]]:
    """Prompts of 1 to 60 tokens; every third begins like another one, so that prefixes repeat."""
    generator = random.Random(0)
    lengths = [1, 16, 17, 32, *(generator.randint(2, 60) for _ in range(count))][:count]
    prompts = [[generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    for index in range(2, count, 3):
        prompts[index] = prompts[index - 1][: generator.randint(1, 40)] + prompts[index]
    return prompts


def greedy_oracle(path: Path, prompts: list[list[int]], n: int) -> list[list[int]]:
    """The ``n`` tokens that transformers finds most probable after each prompt, end of sequence ignored."""
    model = oracle_model(path)
    guesses = _generate_padded(model, prompts, n)
    return [
        guess if _is_greedy(model, prompt, guess) else _generate(model, prompt, n)
        for prompt, guess in zip(prompts, guesses, strict=True)
    ]


@cache
def oracle_model(path: Path) -> PreTrainedModel:
    """The model of a folder, as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def _generate_padded(model: PreTrainedModel, prompts: list[list[int]], n: int) -> list[list[int]]:
    """All prompts at once, which takes little longer than one of them. Padding may change what some models say."""
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    never = model.config.vocab_size  # the end of a sequence
    options = {
        "attention_mask": mask,
        "max_new_tokens": n,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": never,
    }
    return model.generate(ids, **options)[:, length:].tolist()


@torch.inference_mode()
def _is_greedy(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> bool:
    """Whether each of ``tokens`` is the most probable one after ``prompt`` and those before it, all seen at once."""
    logits = model(input_ids=torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens


@torch.inference_mode()
def _generate(model: PreTrainedModel, prompt: list[int], n: int) -> list[int]:
    ids, cache, tokens = torch.tensor([prompt]), None, []
    for _ in range(n):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        tokens.append(int(output.logits[0, -1].argmax()))
        ids = torch.tensor([tokens[-1:]])
    return tokens


@torch.no_grad()
def _spread_constants(model: PreTrainedModel) -> None:
    """Norm weights are made as ones and biases as zeros, which would hide a mistake in them."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0, 0.3)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)
