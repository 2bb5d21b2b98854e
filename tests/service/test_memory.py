"""What the processes hold in memory, and that they give everything back."""

from pathlib import Path

from openai import OpenAI

from tests.service.conftest import DEMO, FLOAT32, MODEL, SMALL_POOLS, Stack
from tests.support.processes import Engine, Router

POOLS_MIB = 64 + 64
ENGINE_ALLOWANCE_MIB = 700
ROUTER_LIMIT_MIB = 250


def load(stack_url: str, requests: int) -> None:
    client = OpenAI(base_url=f"{stack_url}/v1", api_key="none", max_retries=0)
    streams = [
        client.completions.create(model=MODEL, prompt=f"{index} " * 200, max_tokens=64, stream=True)
        for index in range(requests)
    ]
    for stream in streams:
        list(stream)


def test_engine_and_router_stay_within_their_limits_after_work(stack: Stack) -> None:
    load(stack.router.url, 48)
    weights = sum(path.stat().st_size for path in DEMO.glob("*.safetensors")) / (1 << 20)
    for engine in stack.engines:
        assert engine.resident_mib < weights + POOLS_MIB + ENGINE_ALLOWANCE_MIB
    assert stack.router.resident_mib < ROUTER_LIMIT_MIB


def test_the_router_has_no_torch_loaded(stack: Stack) -> None:
    mapped = Path(f"/proc/{stack.router.popen.pid}/maps").read_text()
    assert "torch" not in mapped


def test_work_under_pressure_swaps_and_every_block_comes_back(tmp_path: Path) -> None:
    """Real requests on a pool far too small for them: they swap, all answers come, no block is lost."""
    engine = Engine(DEMO, tmp_path, "--kv-cache-memory", str(6 << 20), "--swap-space", "0.125", *FLOAT32)
    router = Router(DEMO, [engine.address], tmp_path)
    try:
        engine.wait_ready()
        router.wait_ready()
        client = OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
        settings = {"model": MODEL, "max_tokens": 300, "temperature": 0, "extra_body": {"ignore_eos": True}}
        alone = client.completions.create(prompt="Once upon a time", **settings).choices[0].text
        streams = [client.completions.create(prompt="Once upon a time", stream=True, **settings) for _ in range(12)]
        texts = ["".join(chunk.choices[0].text for chunk in stream if chunk.choices) for stream in streams]
        assert set(texts) == {alone}
        assert engine.metric("quire_engine_preemptions_total", mode="swap") > 0
        assert engine.metric("quire_engine_swapped_blocks_total", direction="in") > 0
        for tier in ("device", "host"):
            assert engine.metric("quire_engine_free_blocks", tier=tier) == engine.metric(
                "quire_engine_blocks", tier=tier
            )
    finally:
        assert [router.stop(), engine.stop()] == [0, 0]


def test_small_pools_are_what_the_engine_was_told(stack: Stack) -> None:
    assert SMALL_POOLS[1] == str(64 << 20)
    for engine in stack.engines:
        device = engine.metric("quire_engine_blocks", tier="device")
        assert device > 0
        assert engine.metric("quire_engine_blocks", tier="host") == device + 1, "equal bytes hold equally many blocks"
