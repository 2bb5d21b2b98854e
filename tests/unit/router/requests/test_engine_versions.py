"""An answer that has begun is continued by engines of its model's version only; one that has not takes any."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import engine_pb2
from quire_proto.errors import ErrorCode, QuireError
from quire_router.core.generation import GenerationRequest
from quire_router.core.model_version import UNKNOWN_VERSION, ModelVersion
from quire_router.journal.memory import MemoryJournal

from tests.support.byte_tokenizer import tokens
from tests.support.runner_harness import QUICK, delta_text, open_runner, started
from tests.support.scripted_engine import STOP, output
from tests.unit.router.requests.test_runner import request

OLD = {"model_revision": "old", "settings_digest": b"12345678"}
NEW = {"model_revision": "new", "settings_digest": b"12345678"}
OTHER_TYPE = {"model_revision": "old", "settings_digest": b"87654321"}
OF_OTHERS = {"model_revision": "vllm:/models/new"}  # without a digest of the settings
SILENT: dict[str, object] = {}
parts = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)


@pytest.mark.parametrize("other", [NEW, OTHER_TYPE], ids=["weights", "settings"])
async def test_what_has_begun_passes_over_an_engine_of_another_version(other: dict[str, object]) -> None:
    async with open_runner(3, grace=0.05, descriptions=[OLD, other, OLD]) as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        place.engine.send(output("r", tokens("a"), 0))
        await place.delivered("a")
        record = await place.journal.read("r")
        await place.engine.stop()
        again = await place.engines[2].submit()
        place.engines[2].send(output(again.request_id, tokens("b"), 1, STOP))
        assert delta_text(await task) == "ab"
    assert record is not None
    assert record.version == ModelVersion("old", b"12345678".hex())


@pytest.mark.parametrize("other", [OF_OTHERS, SILENT], ids=["server of others", "says nothing"])
async def test_what_is_not_known_of_both_is_no_difference(other: dict[str, object]) -> None:
    async with open_runner(2, grace=0.05, descriptions=[OLD, other]) as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        place.engine.send(output("r", tokens("a"), 0))
        await place.delivered("a")
        await place.engine.stop()
        again = await place.engines[1].submit()
        place.engines[1].send(output(again.request_id, tokens("b"), 1, STOP))
        assert delta_text(await task) == "ab"


async def test_what_has_not_begun_takes_the_version_of_its_next_engine() -> None:
    async with open_runner(2, grace=0.05, descriptions=[OLD, NEW]) as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        await place.engine.stop()
        again = await place.engines[1].submit()
        place.engines[1].send(output(again.request_id, tokens("a"), 0))
        await place.delivered("a")
        record = await place.journal.read("r")
        place.engines[1].send(output(again.request_id, tokens("b"), 1, STOP))
        assert delta_text(await task) == "ab"
    assert record is not None
    assert record.version.revision == "new"


async def test_without_its_version_a_request_waits_as_without_an_engine_and_is_left_to_be_resumed() -> None:
    async with open_runner(2, grace=0.05, hold_timeout=0.3, descriptions=[OLD, NEW]) as place:
        streamed = GenerationRequest("r", "m", tokens("hello"), request().params, stream=True)
        task, _ = await started(place, place.lifecycle.run(streamed))
        place.engine.send(output("r", tokens("a"), 0))
        await place.delivered("a")
        await place.engine.stop()
        with pytest.raises(QuireError, match="the version of the model which began this answer") as refusal:
            await task
        record = await place.journal.read("r")
    assert (refusal.value.code, refusal.value.reason) == (ErrorCode.UNAVAILABLE, "version_gone")
    assert refusal.value.retry_after
    assert record is not None
    assert (record.finish_reason, record.leased) == (None, False)


async def test_an_engine_of_the_version_that_comes_while_a_request_waits_gets_it() -> None:
    async with open_runner(2, grace=0.05, descriptions=[OLD, NEW]) as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        place.engine.send(output("r", tokens("a"), 0))
        await place.delivered("a")
        await place.engine.stop()
        await place.ready(1)
        place.engine.restart_as(2)
        await place.engine.start()
        again = await place.engine.submit()
        place.engine.send(output(again.request_id, tokens("b"), 1, STOP))
        assert delta_text(await task) == "ab"


async def test_a_request_does_not_leave_a_silent_engine_for_one_of_another_version() -> None:
    impatient = {**QUICK, "silence": 0.2, "stall": 3600}
    async with open_runner(2, link=impatient, descriptions=[OLD, NEW]) as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        place.engine.send(output("r", tokens("a"), 0))
        await place.delivered("a")
        place.engine.freeze()
        await place.ready(1)
        place.engine.thaw()
        place.engine.send(output("r", tokens("b"), 1, STOP))
        assert delta_text(await task) == "ab"
        assert place.engines[1].commands.empty()


async def test_a_record_of_an_older_router_is_continued_by_any_version() -> None:
    journal = MemoryJournal()
    lease = journal.open(GenerationRequest("r", "m", tokens("hello"), request().params, background=True))
    journal.append_token(lease, 0, 0, tokens("a")[0])
    journal.release(lease)
    async with open_runner(1, journal=journal, descriptions=[NEW]) as place:
        await place.lifecycle.claim_orphans()
        again = await place.engine.submit()
        place.engine.send(output(again.request_id, tokens("b"), 1, STOP))
        await place.delivered("ab")


@pytest.mark.parametrize("kind", ["claimed by the version", "claimed by another"])
async def test_another_router_continues_with_the_version_in_the_record(kind: str) -> None:
    journal = MemoryJournal()
    lease = journal.open(GenerationRequest("r", "m", tokens("hello"), request().params, background=True))
    journal.set_version(lease, ModelVersion("old", b"12345678".hex()))
    journal.append_token(lease, 0, 0, tokens("a")[0])
    journal.release(lease)
    same = kind == "claimed by the version"
    async with open_runner(1, journal=journal, hold_timeout=0.2, descriptions=[OLD if same else NEW]) as place:
        await place.lifecycle.claim_orphans()
        if same:
            again = await place.engine.submit()
            assert list(again.output_token_ids) == tokens("a")
        else:
            await place.lifecycle.drain(5)
            assert place.engine.commands.empty()


@given(parts, parts.filter(lambda text: " " not in text))
def test_a_version_is_read_as_it_was_written(revision: str, settings: str) -> None:
    version = ModelVersion(revision, settings)
    assert ModelVersion.parse(str(version)) == version


@given(st.text())
def test_any_text_is_a_version_or_none(text: str) -> None:
    assert ModelVersion.parse(text).continues(UNKNOWN_VERSION)
    assert ModelVersion.parse("\n" + text) == UNKNOWN_VERSION == ModelVersion.parse("x" * 300)


def test_a_long_name_of_weights_is_kept_short() -> None:
    one, other = (
        ModelVersion.of(engine_pb2.DescribeResponse(model_revision="x" * 300 + name, settings_digest=b"12345678"))
        for name in "ab"
    )
    assert not one.continues(other)
    assert ModelVersion.parse(str(one)) == one
