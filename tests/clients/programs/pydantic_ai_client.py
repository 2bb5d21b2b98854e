"""pydantic-ai's agents, on chat completions and on Responses: ``pydantic_ai_client.py URL SLOW_URL``. Their history
goes back as they keep it.
"""

import asyncio
import sys
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from scenarios import CITIES, ENDLESS, FIRST, FORCED, PARAMETERS, RESULT, SECOND, run

QUESTION, NEXT, CITY = FIRST[0]["content"], SECOND["content"], CITIES[0]["content"]


class Sum(BaseModel):
    """The answer in a form of its own."""

    total: Literal[12, 7]


AnyModel = OpenAIChatModel | OpenAIResponsesModel


def scenarios(model: AnyModel, slow: AnyModel) -> dict[str, Callable[[], object]]:
    agent = Agent(model, model_settings=PARAMETERS)

    def streamed() -> object:
        async def ask() -> object:
            async with agent.run_stream(QUESTION) as answer:
                text = "".join([piece async for piece in answer.stream_text(delta=True, debounce_by=None)])
                usage = answer.usage() if callable(answer.usage) else answer.usage
            return {"text": text, "usage": [usage.input_tokens, usage.output_tokens]}

        return asyncio.run(ask())

    def second_turn() -> object:
        first = agent.run_sync(QUESTION)
        return {"text": agent.run_sync(NEXT, message_history=first.all_messages()).output}

    def tool_loop() -> object:
        seen: list[str] = []
        forced = {
            "extra_body": {"logit_bias": FORCED["logit_bias"]},
            "parallel_tool_calls": False,
        }  # it requires the call itself
        caller = Agent(model, model_settings={**PARAMETERS, **forced}, output_type=[weather])
        found = caller.run_sync(CITY)
        seen.append(found.output)
        history = found.all_messages()
        answer = Agent(model, model_settings=PARAMETERS).run_sync(NEXT, message_history=history)
        return {"arguments": f'{{"city": "{seen[0]}"}}', "text": answer.output}

    def parsed_turn() -> object:
        former = Agent(model, model_settings=PARAMETERS, output_type=NativeOutput(Sum))
        return {"total": former.run_sync(QUESTION).output.total}

    def streamed_error() -> object:
        async def ask() -> None:
            bias = {"extra_body": {"logit_bias": ENDLESS["logit_bias"]}}
            settings = {**PARAMETERS, "max_tokens": ENDLESS["max_tokens"], **bias}
            async with Agent(slow, model_settings=settings).run_stream(QUESTION) as answer:
                async for _ in answer.stream_text():
                    pass

        asyncio.run(ask())
        return {"text": "the stream ended without an error"}

    return {act.__name__: act for act in (streamed, second_turn, tool_loop, parsed_turn, streamed_error)}


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    assert RESULT
    return city


def connected(kind: type[AnyModel]) -> list[AnyModel]:
    return [kind("tools", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none")) for url in sys.argv[1:]]


if __name__ == "__main__":
    kinds = {"pydantic-ai": OpenAIChatModel, "pydantic-ai-responses": OpenAIResponsesModel}
    run({name: scenarios(*connected(kind)) for name, kind in kinds.items()})
