"""The ways in which transformers is measured: each makes the tokens that are asked for, and tells its padding."""

import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from quire_engine.bench import measure
from quire_engine.bench.measure import PeerProcess
from quire_engine.bench.workload import Workload, model_of_shape

TINY = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
}
SETTINGS = {"device": "cpu", "dtype": "float32", "threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64}
REQUESTS = [(4, 6), (10, 1), (7, 3), (2, 9), (5, 5)]  # tokens of prompt and output
N = (1, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield model_of_shape(json.dumps(TINY), 0)


def workload(n: int) -> Workload:
    return Workload(
        [[5 + number] * size for number, (size, _) in enumerate(REQUESTS)], [made for _, made in REQUESTS], n
    )


def run(model: Path, batching: str, kv_tokens: int) -> list[float]:
    """The padding of the requests, with one and with three outputs each."""
    settings = {**SETTINGS, "model": str(model), "batching": batching, "kv_tokens": kv_tokens}
    peer = PeerProcess(Path(sys.executable), "run_transformers.py", settings, os.environ)
    try:
        told = []
        for n in N:
            assert peer.seconds(workload(n)) > 0
            assert peer.padding is not None
            told.append(peer.padding)
        return told
    finally:
        peer.close()


def padding_of_batches(size: int) -> float:
    """Counted position by position: which ones no request needs."""
    wasted = computed = 0
    for start in range(0, len(REQUESTS), size):
        batch = REQUESTS[start : start + size]
        longest, steps = max(prompt for prompt, _ in batch), max(made for _, made in batch)
        for prompt, made in batch:
            for position in range(longest + steps - 1):
                computed += 1
                wasted += position < longest - prompt or position >= longest + made - 1
    return wasted / computed


@pytest.mark.soak
@pytest.mark.parametrize("batching", ["serial", "continuous"])
def test_requests_one_by_one_and_continuous_batches_have_no_padding(model: Path, batching: str) -> None:
    assert run(model, batching, 1000) == [0.0, 0.0]


@pytest.mark.soak
def test_a_static_batch_pays_for_its_longest(model: Path) -> None:
    assert run(model, "static", 40) == [pytest.approx(padding_of_batches(size)) for size in (2, 1)]


@pytest.mark.parametrize(("kv_tokens", "sizes"), [(1000, (8, 2)), (40, (2, 1)), (5, (1, 1))])
def test_a_static_batch_is_as_large_as_fits(
    monkeypatch: pytest.MonkeyPatch, kv_tokens: int, sizes: tuple[int, int]
) -> None:
    """The longest prompt and output are 19 tokens, and three outputs are three rows."""
    monkeypatch.syspath_prepend(Path(measure.__file__).parent / "peers")
    static = import_module("run_transformers").Static(None, {**SETTINGS, "batching": "static", "kv_tokens": kv_tokens})
    assert tuple(static.batch_size(19, n) for n in N) == sizes
