"""What a chat's choice says beside its text, in its message."""

from google.protobuf.message import Message
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2

from quire_router.api.reading import TOOL_CALLS, ParsedDelta


def write_said(message: Message, said: ParsedDelta) -> None:
    """Adds thoughts and calls to the message of a piece, whose text is the content already."""
    chat = message.chat if isinstance(message, pb.ResumeResponse) else message
    assert isinstance(chat, pb.ChatResponse)
    chat.reasoning = said.reasoning
    for call in said.calls:
        chat.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
    if said.finish_reason == TOOL_CALLS:
        chat.finish_reason = types_pb2.FINISH_REASON_TOOL_CALLS
