"""An architecture is one file and one line of the registry, and nothing asks for a class."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import quire_engine
from quire_engine.models.decoder import DecoderModel
from quire_engine.models.loader import decoder_class
from quire_engine.models.registry import ARCHITECTURES, registered_name

from tests.model.models import CONFIGS as SMALL_MODELS

ROOT = Path(quire_engine.__file__).parent
MAX_LINES = 150
CONFIGS = {"ModelConfig", "DecoderConfig", "TransformersConfig", "EncoderConfig"}
MODELS = {"Model", "LayeredModel", "DecoderModel", "TransformersModel", "EncoderModel", *ARCHITECTURES}
BACKENDS = {"CpuAttention", "FlashInferAttention", "MixedAttention", "ReferenceAttention"}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_architecture_is_a_short_file_with_its_class(name: str) -> None:
    own = ARCHITECTURES[name]
    found, module = decoder_class(name), import_module(f"quire_engine.models.{own.module}")
    assert issubclass(found, DecoderModel)
    assert found.__module__ == module.__name__
    assert len(Path(str(module.__file__)).read_text().splitlines()) <= MAX_LINES
    assert own.gguf is None or found.gguf.names


def test_each_architecture_has_a_small_model_that_is_compared_with_transformers() -> None:
    assert {own.model_type for own in ARCHITECTURES.values()} <= {model_type for model_type, _ in SMALL_MODELS.values()}


def test_forms_that_pool_prompts_are_the_same_architecture() -> None:
    assert registered_name("Qwen3ForSequenceClassification") == registered_name("Qwen3Model") == "Qwen3ForCausalLM"
    assert registered_name("GPT2LMHeadModel") is None


def asked_classes(path: Path) -> Iterator[str]:
    """The names in the second argument of each ``isinstance``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            yield from (each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name))


def test_nothing_asks_for_the_class_of_a_model_its_configuration_or_an_attention_backend() -> None:
    assert {path for path in ROOT.rglob("*.py") if (CONFIGS | MODELS | BACKENDS) & set(asked_classes(path))} == set()
