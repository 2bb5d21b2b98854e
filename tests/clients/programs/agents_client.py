"""The openai-agents package of Python: ``agents_client.py URL SLOW_URL``."""

import asyncio
import sys
from collections.abc import Callable
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from scenarios import CITIES, ENDLESS, FIRST, FORCED, PARAMETERS, RESULT, SECOND, run

QUIET = RunConfig(tracing_disabled=True)


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    return RESULT


def agent(url: str, *, tools: bool = False, **settings: object) -> Agent:
    model = OpenAIChatCompletionsModel("tools", AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    chosen = {"temperature": PARAMETERS["temperature"], "max_tokens": PARAMETERS["max_tokens"], "include_usage": True}
    more = {"tools": [weather]} if tools else {}
    return Agent("tester", model=model, model_settings=ModelSettings(**{**chosen, **settings}), **more)


async def _streamed(url: str) -> object:
    result = Runner.run_streamed(agent(url), FIRST[0]["content"], run_config=QUIET)
    async for _ in result.stream_events():
        pass
    usage = result.context_wrapper.usage
    return {"text": result.final_output, "usage": [usage.input_tokens, usage.output_tokens]}


async def _second_turn(url: str) -> object:
    first = await Runner.run(agent(url), FIRST[0]["content"], run_config=QUIET)
    again = await Runner.run(agent(url), [*first.to_input_list(), SECOND], run_config=QUIET)
    return {"text": again.final_output}


async def _tool_loop(url: str) -> object:
    caller = agent(
        url,
        tools=True,
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body={"logit_bias": FORCED["logit_bias"]},
    )
    result = await Runner.run(caller, CITIES[0]["content"], run_config=QUIET)
    calls = [item.raw_item.arguments for item in result.new_items if item.type == "tool_call_item"]
    return {"arguments": calls[0], "text": result.final_output}


async def _streamed_error(url: str) -> object:
    endless = agent(url, max_tokens=ENDLESS["max_tokens"], extra_body={"logit_bias": ENDLESS["logit_bias"]})
    result = Runner.run_streamed(endless, FIRST[0]["content"], run_config=QUIET)
    async for _ in result.stream_events():
        pass
    return {"text": "the stream ended without an error"}


def scenarios(url: str, slow_url: str) -> dict[str, Callable[[], object]]:
    """Each in an event loop of its own, with a client of its own."""
    return {
        "streamed": lambda: asyncio.run(_streamed(url)),
        "second_turn": lambda: asyncio.run(_second_turn(url)),
        "tool_loop": lambda: asyncio.run(_tool_loop(url)),
        "streamed_error": lambda: asyncio.run(_streamed_error(slow_url)),
    }


if __name__ == "__main__":
    set_tracing_disabled(True)
    run({"openai-agents": scenarios(*sys.argv[1:])})
