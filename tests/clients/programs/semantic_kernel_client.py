"""Semantic Kernel's OpenAIChatCompletion: ``semantic_kernel_client.py URL SLOW_URL``."""

import asyncio
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

from openai import AsyncOpenAI
from scenarios import CITIES, ENDLESS, FIRST, FORCED, PARAMETERS, RESULT, SECOND, run
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory, FunctionCallContent, FunctionResultContent
from semantic_kernel.functions import kernel_function


class City(StrEnum):
    """Of which Semantic Kernel makes an ``enum`` in the tool's schema."""

    ROME = "Rome"
    OSLO = "Oslo"


class Weather:
    """A plugin, as users of Semantic Kernel write them."""

    @kernel_function(name="weather", description="The weather in a city.")
    def weather(self, city: Annotated[City, "The city"]) -> str:
        return RESULT


def settings(**fields: Any) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(**{**PARAMETERS, **fields})


def scenarios(client: OpenAIChatCompletion, slow: OpenAIChatCompletion) -> dict[str, Callable[[], object]]:
    kernel = Kernel()
    kernel.add_plugin(Weather(), "city")

    def history(message: dict[str, str]) -> ChatHistory:
        asked = ChatHistory()
        asked.add_user_message(message["content"])
        return asked

    async def stream(client: OpenAIChatCompletion, **fields: Any) -> tuple[str, Any]:
        text, usage = "", None
        async for chunk in client.get_streaming_chat_message_content(history(FIRST[0]), settings(**fields)):
            text += str(chunk)
            usage = chunk.metadata.get("usage") or usage
        return text, usage

    async def streamed() -> object:
        text, usage = await stream(client)
        return {"text": text, "usage": [usage.prompt_tokens, usage.completion_tokens]}

    async def second_turn() -> object:
        asked = history(FIRST[0])
        asked.add_message(await client.get_chat_message_content(asked, settings()))
        asked.add_user_message(SECOND["content"])
        return {"text": str(await client.get_chat_message_content(asked, settings()))}

    async def tool_loop() -> object:
        asked = history(CITIES[0])
        forced = {name: value for name, value in FORCED.items() if name != "tool_choice"}
        behavior = FunctionChoiceBehavior.Required(auto_invoke=False)
        answer = await client.get_chat_message_content(
            asked, settings(function_choice_behavior=behavior, **forced), kernel=kernel
        )
        asked.add_message(answer)
        (call,) = [item for item in answer.items if isinstance(item, FunctionCallContent)]
        result = FunctionResultContent.from_function_call_content_and_result(call, RESULT)
        asked.add_message(result.to_chat_message_content())
        offered = settings(function_choice_behavior=FunctionChoiceBehavior.Auto(auto_invoke=False))
        final = await client.get_chat_message_content(asked, offered, kernel=kernel)
        return {"arguments": call.arguments, "text": str(final)}

    async def streamed_error() -> object:
        await stream(slow, **ENDLESS)
        return {"text": "the stream ended without an error"}

    loop = asyncio.new_event_loop()
    acts = (streamed, second_turn, tool_loop, streamed_error)
    return {act.__name__: lambda act=act: loop.run_until_complete(act()) for act in acts}


def connect(url: str) -> OpenAIChatCompletion:
    return OpenAIChatCompletion("tools", async_client=AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))


if __name__ == "__main__":
    run({"semantic-kernel": scenarios(*map(connect, sys.argv[1:]))})
