"""AutoGen's OpenAIChatCompletionClient: ``autogen_client.py URL SLOW_URL``."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    UserMessage,
)
from autogen_ext.models.openai import OpenAIChatCompletionClient
from scenarios import CITIES, ENDLESS, FIRST, FORCED, PARAMETERS, RESULT, SECOND, TOOL, run


def asked(message: dict[str, str]) -> UserMessage:
    return UserMessage(content=message["content"], source="user")


def scenarios(client: OpenAIChatCompletionClient, slow: OpenAIChatCompletionClient) -> dict[str, Callable[[], object]]:
    first, cities = [asked(FIRST[0])], [asked(CITIES[0])]

    async def stream(client: OpenAIChatCompletionClient, **fields: Any) -> tuple[str, CreateResult]:
        pieces: list[str] = []
        async for piece in client.create_stream(first, include_usage=True, extra_create_args=fields):
            if isinstance(piece, CreateResult):
                return "".join(pieces), piece
            pieces.append(piece)
        raise AssertionError("the stream ended without a result")

    async def streamed() -> object:
        text, last = await stream(client)
        return {"text": text, "usage": [last.usage.prompt_tokens, last.usage.completion_tokens]}

    async def second_turn() -> object:
        answer = await client.create(first)
        said = AssistantMessage(content=answer.content, source="assistant")
        return {"text": (await client.create([*first, said, asked(SECOND)])).content}

    async def tool_loop() -> object:
        forced = {name: value for name, value in FORCED.items() if name != "tool_choice"}
        answer = await client.create(cities, tools=[TOOL["function"]], tool_choice="required", extra_create_args=forced)
        (call,) = answer.content
        said = AssistantMessage(content=answer.content, source="assistant")
        result = FunctionExecutionResult(content=RESULT, name=call.name, call_id=call.id)
        final = await client.create(
            [*cities, said, FunctionExecutionResultMessage(content=[result])], tools=[TOOL["function"]]
        )
        return {"arguments": call.arguments, "text": final.content}

    async def streamed_error() -> object:
        await stream(slow, **ENDLESS)
        return {"text": "the stream ended without an error"}

    loop = asyncio.new_event_loop()
    acts = (streamed, second_turn, tool_loop, streamed_error)
    return {act.__name__: lambda act=act: loop.run_until_complete(act()) for act in acts}


def connect(url: str) -> OpenAIChatCompletionClient:
    abilities = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    about = {**abilities, "family": "unknown"}
    return OpenAIChatCompletionClient(
        model="tools", base_url=f"{url}/v1", api_key="none", max_retries=0, model_info=about, **PARAMETERS
    )


if __name__ == "__main__":
    run({"autogen": scenarios(*map(connect, sys.argv[1:]))})
