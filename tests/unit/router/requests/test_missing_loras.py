"""A request that was accepted waits for its adapter: only one that was unloaded, or replaced, is unknown."""

from dataclasses import replace

import pytest
from quire.v1 import types_pb2
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_router.core.generation import LoRA

from tests.support.byte_tokenizer import tokens
from tests.support.runner_harness import RunnerHarness, delta_text, open_runner, started
from tests.support.scripted_engine import ERROR, STOP, output
from tests.support.waiting import until
from tests.unit.router.requests.test_runner import request

SQL = LoRA("sql", b"sql")


def begin_again(place: RunnerHarness, generation: int) -> None:
    """The engine begins again, without what was loaded while it served."""
    place.engine.loras = {}
    place.engine.restart_as(generation)
    place.engine.break_stream()


async def hears(place: RunnerHarness, *names: str) -> None:
    await until(lambda: set(place.fleet.engines()[0].connection.loras) == set(names))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("background", [False, True])
async def test_a_request_waits_for_an_engine_that_began_again_to_get_its_adapter(begun: bool, background: bool) -> None:
    async with open_runner() as place:
        place.engine.set_loras({"sql": b"sql"})
        await hears(place, "sql")
        answer = place.lifecycle.run(replace(request(), lora=SQL, background=background))
        task, _ = await started(place, answer)
        if begun:
            place.engine.send(output("r", tokens("ab"), 0))
            await place.delivered("ab")
        begin_again(place, 2)
        await hears(place)
        assert not task.done()
        place.engine.set_loras({"sql": b"sql"})
        again = await place.engine.submit()
        assert (again.lora_digest, list(again.output_token_ids)) == (b"sql", tokens("ab") if begun else [])
        place.engine.send(output(again.request_id, tokens("c"), 2 * begun, STOP))
        assert delta_text(await task) == ("abc" if begun else "c")


@pytest.mark.parametrize("begun", [False, True])
async def test_one_that_waits_in_vain_is_left_for_another_router(begun: bool) -> None:
    async with open_runner(hold_timeout=0.1) as place:
        place.engine.set_loras({"sql": b"sql"})
        await hears(place, "sql")
        task, _ = await started(place, place.lifecycle.run(replace(request(), lora=SQL, background=True)))
        if begun:
            place.engine.send(output("r", tokens("ab"), 0))
            await place.delivered("ab")
        begin_again(place, 2)
        with pytest.raises(QuireError) as left:
            await task
        assert (left.value.code, left.value.reason) == (ErrorCode.UNAVAILABLE, "none_ready")
        record = await place.journal.read("r")
        assert record is not None
        assert (record.finish_reason, record.leased) == (None, False)


@pytest.mark.parametrize("loras", [{}, {"sql": b"other files"}])
@pytest.mark.parametrize("begun", [False, True])
async def test_what_was_unloaded_or_replaced_is_unknown(loras: dict[str, bytes], begun: bool) -> None:
    async with open_runner(hold_timeout=0.1) as place:
        place.engine.set_loras({"sql": b"sql"})
        await hears(place, "sql")
        task, _ = await started(place, place.lifecycle.run(replace(request(), lora=SQL)))
        if begun:
            place.engine.send(output("r", tokens("ab"), 0))
            await place.delivered("ab")
        place.engine.set_loras(loras)
        await hears(place, *loras)
        begin_again(place, 2)
        place.engine.loras = loras
        with pytest.raises(QuireError) as unknown:
            await task
        assert (unknown.value.code, unknown.value.reason) == (ErrorCode.NOT_FOUND, "model_not_found")
        await place.left_nothing("r", FinishReason.ERROR, "ab" if begun else "")


async def test_an_engine_that_lacks_an_adapter_which_it_had_a_moment_ago_is_asked_again() -> None:
    async with open_runner() as place:
        place.engine.set_loras({"sql": b"sql"})
        await hears(place, "sql")
        task, _ = await started(place, place.lifecycle.run(replace(request(), lora=SQL)))
        missing = types_pb2.Error(code=types_pb2.ERROR_CODE_NOT_FOUND, message="This engine has no adapter sql.")
        place.engine.send(output("r", [], 0, ERROR, missing))
        again = await place.engine.submit()
        place.engine.send(output(again.request_id, tokens("c"), 0, STOP))
        assert delta_text(await task) == "c"
