"""A decode step, a request and a streamed token pass few files, and docs/reference/paths.md lists them."""

import pytest
import torch
from quire_engine.kernels.bindings import library
from quire_engine.kernels.packed_linear import is_fast

from tests.support.paths import (
    DECODE_STEP,
    MESSAGES,
    PAGE,
    REQUEST,
    STREAMED_TOKEN,
    trace_request,
    trace_steps,
    trace_token,
)
from tests.support.traced_calls import Trace, table_in

STEP_FILES, STEP_FUNCTIONS = 16, 75
REQUEST_FILES = 50  # each has a part of the request, of its text, its placement or its way to the engine
TOKEN_FILES = 10
HAS_KERNELS = library() is not None and is_fast(torch.bfloat16)
WRITE = "write the page again: .venv/bin/python -m tests.support.paths"


def check_path(trace: Trace, heading: str, files: int) -> None:
    """Asserts that the table under ``heading`` has the trace's functions, in any order, and at most ``files`` files."""
    assert len(trace) <= files, "\n".join(trace)
    listed = table_in(PAGE, f"## {heading}")
    assert listed == {file: set(names) for file, names in trace.items()}, WRITE


async def test_a_streamed_token_passes_few_files():
    check_path(await trace_token(), STREAMED_TOKEN, TOKEN_FILES)


async def test_a_token_of_a_message_passes_as_few_functions_as_one_of_a_chat():
    chat, message = await trace_token(), await trace_token(MESSAGES)
    assert chat.pop("quire_router/api/rest/openai_format.py") == ["ChunkEncoder.encode_token"]
    assert message.pop("quire_router/api/rest/messages_format.py") == ["MessageEncoder.encode_token"]
    assert message == chat


async def test_a_request_passes_few_files_before_its_first_token():
    check_path(await trace_request(), REQUEST, REQUEST_FILES)


@pytest.mark.skipif(not HAS_KERNELS, reason="the kernels cannot be compiled here, or are slower than torch")
def test_a_decode_step_passes_few_files_and_functions() -> None:
    trace = trace_steps()
    check_path(trace, DECODE_STEP, STEP_FILES)
    assert sum(map(len, trace.values())) <= STEP_FUNCTIONS
