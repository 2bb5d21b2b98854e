"""The openai package and openai-agents of Python on the Responses API, which is what the agents speak unless they are
told otherwise: ``responses_client.py URL SLOW_URL``. Items go back as the packages hand them out.
"""

import asyncio
import sys
from collections.abc import Callable
from typing import Literal

from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from scenarios import CITIES, ENDLESS, FIRST, FORCED, PARAMETERS, RESULT, SECOND, TOOL, run

QUESTION, CITY = FIRST[0]["content"], CITIES[0]["content"]
ASKED = {"model": "tools", "temperature": PARAMETERS["temperature"], "max_output_tokens": PARAMETERS["max_tokens"]}
BIASED = {"extra_body": {"logit_bias": FORCED["logit_bias"]}}
TOOLS = [{"type": "function", **TOOL["function"]}]
QUIET = RunConfig(tracing_disabled=True)


class Sum(BaseModel):
    """The answer in a form of its own."""

    total: Literal[12, 7]


def read_later(client: OpenAI) -> object:
    """A stream that is left, read on and read again."""
    numbers, text, response_id = [], "", ""
    for event in client.responses.create(**ASKED, input=QUESTION, stream=True):
        numbers.append(event.sequence_number)
        response_id = event.response.id if event.type == "response.created" else response_id
        text += event.delta if event.type == "response.output_text.delta" else ""
        if len(numbers) == 8:
            break
    for event in client.responses.retrieve(response_id, stream=True, starting_after=numbers[-1]):
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert client.responses.retrieve(response_id).output_text == text
    (item,) = client.responses.input_items.list(response_id).data
    assert item.content[0].text == QUESTION
    client.responses.delete(response_id)
    return {"text": text}


def packages_scenarios(client: OpenAI, slow: OpenAI) -> dict[str, Callable[[], object]]:
    def streamed() -> object:
        with client.responses.stream(**ASKED, input=QUESTION) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert text == final.output_text
        return {"text": text, "usage": [final.usage.input_tokens, final.usage.output_tokens]}

    def second_turn() -> object:
        first = client.responses.create(**ASKED, input=QUESTION)
        again = client.responses.create(**ASKED, input=[*FIRST, *first.output, SECOND])
        gone_on = client.responses.create(**ASKED, input=SECOND["content"], previous_response_id=first.id)
        assert again.output_text == gone_on.output_text
        return {"text": gone_on.output_text}

    def parsed_turn() -> object:
        return {"total": client.responses.parse(**ASKED, input=QUESTION, text_format=Sum).output_parsed.total}

    def tool_loop() -> object:
        forced = {"tool_choice": "required", "parallel_tool_calls": False, **BIASED}
        first = client.responses.create(**ASKED, input=CITY, tools=TOOLS, **forced)
        (call,) = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
        last = client.responses.create(**ASKED, input=[result], tools=TOOLS, previous_response_id=first.id)
        return {"arguments": call.arguments, "text": last.output_text}

    def streamed_error() -> object:
        endless = {**ASKED, "max_output_tokens": ENDLESS["max_tokens"]}
        bias = {"extra_body": {"logit_bias": ENDLESS["logit_bias"]}}
        for _ in slow.responses.create(**endless, **bias, input=QUESTION, stream=True):
            pass
        return {"text": "the stream ended without an error"}

    acts = {act.__name__: act for act in (streamed, second_turn, parsed_turn, tool_loop, streamed_error)}
    return {**acts, "stored": lambda: read_later(client)}


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    return RESULT


def agent(url: str, *, tools: bool = False, **settings: object) -> Agent:
    model = OpenAIResponsesModel("tools", AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    chosen = {"temperature": PARAMETERS["temperature"], "max_tokens": PARAMETERS["max_tokens"]}
    more = {"tools": [weather], "tool_use_behavior": "stop_on_first_tool"} if tools else {}
    return Agent("tester", model=model, model_settings=ModelSettings(**{**chosen, **settings}), **more)


async def _streamed(url: str) -> object:
    result = Runner.run_streamed(agent(url), QUESTION, run_config=QUIET)
    async for _ in result.stream_events():
        pass
    usage = result.context_wrapper.usage
    return {"text": result.final_output, "usage": [usage.input_tokens, usage.output_tokens]}


async def _second_turn(url: str) -> object:
    first = await Runner.run(agent(url), QUESTION, run_config=QUIET)
    again = await Runner.run(agent(url), [*first.to_input_list(), SECOND], run_config=QUIET)
    response_id = first.last_response_id
    gone_on = await Runner.run(agent(url), SECOND["content"], previous_response_id=response_id, run_config=QUIET)
    assert again.final_output == gone_on.final_output
    return {"text": gone_on.final_output}


async def _tool_loop(url: str) -> object:
    forced = {"tool_choice": "required", "parallel_tool_calls": False, **BIASED}
    first = await Runner.run(agent(url, tools=True, **forced), CITY, run_config=QUIET)
    calls = [item.raw_item.arguments for item in first.new_items if item.type == "tool_call_item"]
    # Without the bias now: with it the small model would come to no end, and an answer that is cut is an error there.
    last = await Runner.run(agent(url, tools=True), first.to_input_list(), run_config=QUIET)
    return {"arguments": calls[0], "text": last.final_output}


async def _streamed_error(url: str) -> object:
    endless = agent(url, max_tokens=ENDLESS["max_tokens"], extra_body={"logit_bias": ENDLESS["logit_bias"]})
    result = Runner.run_streamed(endless, QUESTION, run_config=QUIET)
    async for _ in result.stream_events():
        pass
    return {"text": "the stream ended without an error"}


def agents_scenarios(url: str, slow_url: str) -> dict[str, Callable[[], object]]:
    """Each in an event loop of its own, with a client of its own."""
    return {
        "streamed": lambda: asyncio.run(_streamed(url)),
        "second_turn": lambda: asyncio.run(_second_turn(url)),
        "tool_loop": lambda: asyncio.run(_tool_loop(url)),
        "streamed_error": lambda: asyncio.run(_streamed_error(slow_url)),
    }


if __name__ == "__main__":
    set_tracing_disabled(True)
    clients = [OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for url in sys.argv[1:]]
    run({"openai": packages_scenarios(*clients), "openai-agents": agents_scenarios(*sys.argv[1:])})
