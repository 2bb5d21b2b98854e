"""haystack's OpenAIChatGenerator: ``haystack_client.py URL SLOW_URL``."""

import json
import sys
from collections.abc import Callable
from typing import Any

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import Tool
from haystack.utils import Secret
from scenarios import CITIES, ENDLESS, FIRST, FORCED, PARAMETERS, RESULT, SECOND, TOOL, run


def scenarios(client: OpenAIChatGenerator, slow: OpenAIChatGenerator) -> dict[str, Callable[[], object]]:
    first = [ChatMessage.from_user(FIRST[0]["content"])]
    cities = [ChatMessage.from_user(CITIES[0]["content"])]
    function = TOOL["function"]
    tool = Tool(function["name"], function["description"], function["parameters"], lambda city: RESULT)

    def ask(messages: list[ChatMessage], **fields: Any) -> ChatMessage:
        (reply,) = client.run(messages=messages, **fields)["replies"]
        return reply

    def streamed() -> object:
        pieces: list[str] = []

        def take(chunk: StreamingChunk) -> None:
            pieces.append(chunk.content)

        extra = {**PARAMETERS, "stream_options": {"include_usage": True}}
        usage = ask(first, streaming_callback=take, generation_kwargs=extra).meta["usage"]
        return {"text": "".join(pieces), "usage": [usage["prompt_tokens"], usage["completion_tokens"]]}

    def second_turn() -> object:
        return {"text": ask([*first, ask(first), ChatMessage.from_user(SECOND["content"])]).text}

    def tool_loop() -> object:
        message = ask(cities, tools=[tool], tools_strict=True, generation_kwargs={**PARAMETERS, **FORCED})
        call = message.tool_calls[0]
        final = ask([*cities, message, ChatMessage.from_tool(RESULT, origin=call)], tools=[tool])
        return {"arguments": json.dumps(call.arguments), "text": final.text}

    def streamed_error() -> object:
        slow.run(messages=first, streaming_callback=lambda _: None, generation_kwargs={**PARAMETERS, **ENDLESS})
        return {"text": "the stream ended without an error"}

    return {act.__name__: act for act in (streamed, second_turn, tool_loop, streamed_error)}


def connect(url: str) -> OpenAIChatGenerator:
    settings = {"generation_kwargs": PARAMETERS, "max_retries": 0}
    return OpenAIChatGenerator(Secret.from_token("none"), "tools", api_base_url=f"{url}/v1", **settings)


if __name__ == "__main__":
    run({"haystack": scenarios(*map(connect, sys.argv[1:]))})
