"""An engine that is killed and started again finds on disk the prefixes that were used twice before."""

from pathlib import Path

import pytest
from openai import OpenAI

from tests.service.conftest import DEMO, FLOAT32, MODEL, SMALL_POOLS
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.ports import free_port
from tests.support.processes import Router, eventually

PROMPT = "Once upon a time there was a little dog, and she liked to play in the garden with her friends. " * 6


def ask(router: Router) -> tuple[str, int]:
    """The answer's text, and how many tokens of the prompt were cached."""
    client = OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=2, timeout=60)
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize(
    "ranks",
    [
        (),
        ("--tensor-parallel-size", "2"),
        pytest.param(("--pipeline-parallel-size", "2"), marks=pytest.mark.soak),
    ],
    ids=["one rank", "two ranks", "two stages"],
)
def test_an_engine_that_is_killed_finds_its_prefixes_again(tmp_path: Path, ranks: tuple[str, ...]) -> None:
    port = free_port()
    flags = (*SMALL_POOLS, *FLOAT32, *ranks, "--kv-disk-path", str(tmp_path / "kv"), "--kv-disk-space", "0.1")
    engine = ForkedEngine(DEMO, tmp_path, *flags, port=port).wait_ready()
    router = ForkedRouter(DEMO, [engine.address], tmp_path).wait_ready()
    try:
        first, cached = ask(router)
        assert cached == 0
        second, cached = ask(router)
        assert cached >= 64
        blocks = cached // 16
        eventually(lambda: engine.metric("quire_engine_kv_disk_blocks_total", direction="stored") == blocks)
        engine.kill()
        engine = ForkedEngine(DEMO, tmp_path, *flags, port=port).wait_ready()
        eventually(lambda: router.metric("quire_engines_ready") == 1)
        third, cached_again = ask(router)
        assert first == second == third
        assert cached_again == cached
        eventually(lambda: engine.metric("quire_engine_prefix_hit_tokens_total", tier="disk") == cached)
        assert engine.metric("quire_engine_kv_disk_blocks_total", direction="loaded") == blocks
    finally:
        router.stop()
        assert engine.stop() == 0
