"""Workloads of random prompts and lengths, and models of a given shape with random weights, whose speed is that of
trained ones. Their weights are named and initialised by transformers, as published models have them.
"""

import hashlib
import json
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire_proto.folders import user_cache_folder

from quire_engine.checkpoint.config import one_line
from quire_engine.errors import ModelError

FIRST_TOKEN = 3  # lower ids are special tokens in most vocabularies


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests: ``n`` outputs of ``outputs[i]`` tokens each are generated for ``prompts[i]``, greedily if ``n`` is 1,
    ignoring the end of sequence.
    """

    prompts: list[list[int]]
    outputs: list[int]
    n: int = 1

    @property
    def output_tokens(self) -> int:
        """The number of tokens of all outputs."""
        return self.n * sum(self.outputs)


class Lengths(NamedTuple):
    """A range of lengths in tokens, drawn from uniformly: from ``least`` to ``most``, both included."""

    least: int
    most: int

    @classmethod
    def of(cls, text: str) -> "Lengths":
        """Parses ``128`` or ``100..1024``. Raises ``ValueError`` for anything else."""
        least, _, most = text.partition("..")
        try:
            lengths = cls(int(least), int(most or least))
        except ValueError:
            raise ValueError(f"{text!r} is not a number or a range such as 100..1024.") from None
        if not 1 <= lengths.least <= lengths.most:
            raise ValueError(f"{text!r} must begin at 1 or above, and not end below its beginning.")
        return lengths

    def draw(self, source: random.Random) -> int:
        """A random length of the range."""
        return source.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


def random_prompt(source: random.Random, size: int, vocab_size: int) -> list[int]:
    """``size`` random tokens."""
    return [source.randrange(FIRST_TOKEN, vocab_size) for _ in range(size)]


def random_workload(
    count: int, inputs: Lengths, outputs: Lengths, vocab_size: int, seed: int, *, n: int = 1
) -> Workload:
    """``count`` requests of random tokens and random lengths."""
    source = random.Random(seed)  # noqa: S311 - not for secrets
    sizes = [(inputs.draw(source), outputs.draw(source)) for _ in range(count)]
    prompts = [random_prompt(source, size, vocab_size) for size, _ in sizes]
    return Workload(prompts, [size for _, size in sizes], n)


# From published config.json files.
SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
    },
    "llama3-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
}


def model_of_shape(shape: str, seed: int) -> Path:
    """The folder of a model of this shape in bfloat16, written once for each user. ``shape`` is a name of ``SHAPES``,
    a ``config.json`` or the text of one. Raises ``ModelError``.
    """
    settings = settings_of_shape(shape)
    name = hashlib.sha256(json.dumps([settings, seed], sort_keys=True).encode()).hexdigest()[:16]
    cache = user_cache_folder() / "shapes"
    folder = cache / name
    if not (folder / "config.json").is_file():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _write(settings, seed, folder)
        except OSError as error:
            raise ModelError(f"The model of this shape cannot be written to {cache}: {error.strerror}.") from None
    return folder


def settings_of_shape(text: str) -> dict[str, Any]:
    """The configuration of a shape: a name of ``SHAPES``, a ``config.json`` or its text. Raises ``ModelError``."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        settings = json.loads(Path(text).read_text() if text.endswith(".json") else text)
    except (OSError, ValueError):
        settings = None
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ModelError(
            f"The shape {text!r} is none of {', '.join(SHAPES)}, and not a JSON object with a model_type or a file "
            "with one."
        )
    return settings


def _write(settings: dict[str, Any], seed: int, folder: Path) -> None:
    """Writes to a temporary folder and renames it, so that an incomplete model is never found."""
    import torch
    from transformers import AutoModelForCausalLM

    config = _parse(settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        model.save_pretrained(temporary)
        temporary.replace(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _parse(settings: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    kind = settings["model_type"]
    values = {key: value for key, value in settings.items() if key not in ("model_type", "dtype", "torch_dtype")}
    try:
        return AutoConfig.for_model(kind, **values)
    except Exception as error:  # noqa: BLE001 - transformers checks with exceptions of many kinds
        raise ModelError(f"The shape is not a {kind}: {one_line(error)}.") from None
