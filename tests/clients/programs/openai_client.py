"""The openai package of Python: ``openai_client.py URL SLOW_URL``. Messages go back as the package hands them out."""

import sys
from collections.abc import Callable
from typing import Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel
from scenarios import CITIES, ENDLESS, FIRST, FORCED, PARAMETERS, SECOND, TOOL, run, with_result


class weather(BaseModel):  # noqa: N801 (the class's name is the tool's)
    """The weather in a city."""

    city: Literal["Rome", "Oslo"]


class Sum(BaseModel):
    """The answer in a form of its own."""

    total: Literal[12, 7]


def scenarios(client: OpenAI, slow: OpenAI) -> dict[str, Callable[[], object]]:
    asked = {"model": "tools", **PARAMETERS}

    def streamed() -> object:
        text, usage = "", None
        for chunk in client.chat.completions.create(
            **asked, messages=FIRST, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        return {"text": text, "usage": [usage.prompt_tokens, usage.completion_tokens]}

    def second_turn() -> object:
        with client.chat.completions.stream(**asked, messages=FIRST) as stream:
            message = stream.get_final_completion().choices[0].message
        answer = client.chat.completions.create(**asked, messages=[*FIRST, message, SECOND])
        return {"text": answer.choices[0].message.content}

    def parsed_turn() -> object:
        message = client.chat.completions.parse(**asked, messages=FIRST, response_format=Sum).choices[0].message
        client.chat.completions.create(**asked, messages=[*FIRST, message, SECOND])
        return {"text": message.content}

    def tool_loop() -> object:
        answer = client.chat.completions.parse(
            **asked,
            messages=CITIES,
            tools=[pydantic_function_tool(weather)],
            **FORCED,
        )
        message = answer.choices[0].message
        final = client.chat.completions.create(
            **asked, messages=with_result(message, message.tool_calls[0].id), tools=[TOOL]
        )
        return {"arguments": message.tool_calls[0].function.arguments, "text": final.choices[0].message.content}

    def streamed_error() -> object:
        for _ in slow.chat.completions.create(**{**asked, **ENDLESS}, messages=FIRST, stream=True):
            pass
        return {"text": "the stream ended without an error"}

    return {act.__name__: act for act in (streamed, second_turn, parsed_turn, tool_loop, streamed_error)}


if __name__ == "__main__":
    clients = [OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for url in sys.argv[1:]]
    run({"openai": scenarios(*clients)})
