"""Settings of a model that are assumed before one of its engines has reported them."""

import json

import pytest
from quire_router.discovery.combined import StaticDiscovery
from quire_router.engines.pool import EnginePool
from quire_router.engines.settings import ServedModelLimits, assumed_limits

from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until

CONFIG = {"max_position_embeddings": 64, "vocab_size": 100, "hidden_size": 8}


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "{",
        "[]",
        "3",
        "[" * 100_000,
        *({**CONFIG, "vocab_size": value} for value in (None, 0, "1", 1.5, True)),
    ],
)
def test_a_folder_without_usable_settings_assumes_none(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    assert assumed_limits({"m": tmp_path}) == {}


async def test_the_folders_settings_count_until_an_engine_reports_its_own(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = ScriptedEngine(max_model_len=32, vocab_size=99)
    address = await engine.start()
    fleet = EnginePool(StaticDiscovery([address]), ["m"], assumed=assumed_limits({"m": tmp_path}))
    try:
        assert fleet.limits("m") == ServedModelLimits(64, 100)
        await fleet.start()
        await until(lambda: fleet.ready("m") == 1)
        assert (fleet.limits("m").max_model_len, fleet.limits("m").vocab_size) == (32, 99)
    finally:
        await fleet.close()
        await engine.stop()
