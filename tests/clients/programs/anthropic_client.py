"""Anthropic's package of Python: ``anthropic_client.py URL SLOW_URL``. Messages go back as the package has them."""

import sys
from collections.abc import Callable
from typing import Any, Literal

from anthropic import Anthropic, APIStatusError
from pydantic import BaseModel
from scenarios import CITIES, ENDLESS, FIRST, FORCED, PARAMETERS, RESULT, SECOND, TOOL, run

FUNCTION = TOOL["function"]
WEATHER = {
    **{name: FUNCTION[name] for name in ("name", "description", "strict")},
    "input_schema": FUNCTION["parameters"],
}
CALLED = {"type": "any", "disable_parallel_tool_use": True}


class Sum(BaseModel):
    """The answer in a form of its own."""

    total: Literal[12, 7]


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def usage_of(message: Any) -> list[int]:
    return [message.usage.input_tokens + message.usage.cache_read_input_tokens, message.usage.output_tokens]


def scenarios(client: Anthropic, slow: Anthropic) -> dict[str, Callable[[], object]]:
    asked = {"model": "tools", "max_tokens": PARAMETERS["max_tokens"]}
    sampled = {"temperature": PARAMETERS["temperature"]}

    def streamed() -> object:
        with client.messages.stream(**asked, messages=FIRST, extra_body=sampled) as stream:
            text = "".join(stream.text_stream)
            message = stream.get_final_message()
        assert (message.stop_reason, text) == ("end_turn", text_of(message))
        return {"text": text, "usage": usage_of(message)}

    def second_turn() -> object:
        message = client.messages.create(**asked, messages=FIRST, extra_body=sampled)
        said = {"role": "assistant", "content": message.content}
        answer = client.messages.create(**asked, messages=[*FIRST, said, SECOND], extra_body=sampled)
        return {"text": text_of(answer)}

    def parsed_turn() -> object:
        message = client.messages.parse(**asked, messages=FIRST, output_format=Sum, extra_body=sampled)
        return {"total": message.parsed_output.total}

    def tool_loop() -> object:
        forced = {**sampled, "logit_bias": FORCED["logit_bias"]}
        with client.messages.stream(
            **asked, messages=CITIES, tools=[WEATHER], tool_choice=CALLED, extra_body=forced
        ) as stream:
            arguments = "".join(event.partial_json for event in stream if event.type == "input_json")
            message = stream.get_final_message()
        (call,) = message.content
        assert (message.stop_reason, call.name) == ("tool_use", "weather")
        given = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]}
        turns = [*CITIES, {"role": "assistant", "content": message.content}, given]
        final = client.messages.create(**asked, messages=turns, tools=[WEATHER], extra_body=sampled)
        return {"arguments": arguments, "text": text_of(final)}

    def streamed_error() -> object:
        bias = {**sampled, "logit_bias": ENDLESS["logit_bias"]}
        try:
            with slow.messages.stream(
                **{**asked, "max_tokens": ENDLESS["max_tokens"]}, messages=FIRST, extra_body=bias
            ) as stream:
                stream.until_done()
        except APIStatusError as error:
            return {"error": error.api_message, "type": error.type}
        return {"text": "the stream ended without an error"}

    def refused() -> object:
        try:
            client.messages.create(**{**asked, "model": "other"}, messages=FIRST)
        except APIStatusError as error:
            return {"class": type(error).__name__, "type": error.type, "code": error.error_code, "id": error.request_id}
        return {}

    def counted() -> object:
        tokens = client.messages.count_tokens(model="tools", messages=FIRST).input_tokens
        return {"tokens": tokens, "beta": client.beta.messages.count_tokens(model="tools", messages=FIRST).input_tokens}

    acts = (streamed, second_turn, parsed_turn, tool_loop, streamed_error, refused, counted)
    return {act.__name__: act for act in acts}


if __name__ == "__main__":
    clients = [Anthropic(base_url=url, api_key="none", max_retries=0) for url in sys.argv[1:]]
    run({"anthropic": scenarios(*clients)})
