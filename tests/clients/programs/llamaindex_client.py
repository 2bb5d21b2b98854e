"""LlamaIndex's OpenAILike: ``llamaindex_client.py URL SLOW_URL``. Its messages go back as it hands them out."""

import json
import sys
from collections.abc import Callable

from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool, ToolMetadata
from llama_index.llms.openai_like import OpenAILike
from pydantic import create_model
from scenarios import CITIES, ENDLESS, FIRST, FORCED, PARAMETERS, RESULT, SECOND, TOOL, run


def as_messages(messages: list[dict[str, str]]) -> list[ChatMessage]:
    return [ChatMessage(role=message["role"], content=message["content"]) for message in messages]


def scenarios(client: OpenAILike, slow: OpenAILike) -> dict[str, Callable[[], object]]:
    def streamed() -> object:
        text, usage = "", None
        for chunk in client.stream_chat(as_messages(FIRST), stream_options={"include_usage": True}):
            text += chunk.delta or ""
            usage = chunk.raw.usage or usage
        return {"text": text, "usage": [usage.prompt_tokens, usage.completion_tokens]}

    def second_turn() -> object:
        message = client.chat(as_messages(FIRST)).message
        answer = client.chat([*as_messages(FIRST), message, *as_messages([SECOND])])
        return {"text": answer.message.content}

    def tool_loop() -> object:
        function = TOOL["function"]
        schema = create_model("weather", city=(str, ...))
        schema.model_json_schema = lambda *_, **__: function["parameters"]
        tool = FunctionTool(
            fn=lambda city: RESULT,
            metadata=ToolMetadata(name="weather", description=function["description"], fn_schema=schema),
        )
        bias = {name: value for name, value in FORCED.items() if name == "logit_bias"}
        answer = client.chat_with_tools([tool], chat_history=as_messages(CITIES), tool_required=True, **bias)
        (call,) = client.get_tool_calls_from_response(answer)
        result = ChatMessage(role=MessageRole.TOOL, content=RESULT, additional_kwargs={"tool_call_id": call.tool_id})
        final = client.chat([*as_messages(CITIES), answer.message, result])
        return {"arguments": json.dumps(call.tool_kwargs), "text": final.message.content}

    def streamed_error() -> object:
        for _ in slow.stream_chat(as_messages(FIRST)):
            pass
        return {"text": "the stream ended without an error"}

    return {act.__name__: act for act in (streamed, second_turn, tool_loop, streamed_error)}


def connect(url: str, max_tokens: int, **fields: object) -> OpenAILike:
    kind = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048, "max_retries": 0}
    settings = {"temperature": PARAMETERS["temperature"], "max_tokens": max_tokens, "additional_kwargs": fields}
    return OpenAILike(model="tools", api_base=f"{url}/v1", api_key="none", **kind, **settings)


if __name__ == "__main__":
    url, slow_url = sys.argv[1:]
    # What is given at first holds against what is given with a request.
    client, slow = connect(url, PARAMETERS["max_tokens"]), connect(slow_url, **ENDLESS)
    run({"llamaindex": scenarios(client, slow)})
