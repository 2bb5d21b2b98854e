"""LangChain's ChatOpenAI: ``langchain_client.py URL SLOW_URL``. Its messages go back as it hands them out."""

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from scenarios import CITIES, ENDLESS, FIRST, FORCED, PARAMETERS, RESULT, SECOND, TOOL, run


class Sum(BaseModel):
    """The answer in a form of its own."""

    total: Literal[12, 7]


def scenarios(client: ChatOpenAI, slow: ChatOpenAI) -> dict[str, Callable[[], object]]:
    def streamed() -> object:
        text, usage = "", None
        for chunk in client.stream(FIRST):
            text += chunk.text
            usage = chunk.usage_metadata or usage
        return {"text": text, "usage": [usage["input_tokens"], usage["output_tokens"]]}

    def second_turn() -> object:
        message = client.invoke(FIRST)
        return {"text": client.invoke([*FIRST, message, SECOND]).text}

    def tool_loop() -> object:
        message = client.bind_tools([TOOL], **FORCED).invoke(CITIES)
        (call,) = message.tool_calls
        result = ToolMessage(RESULT, tool_call_id=call["id"])
        final = client.bind_tools([TOOL]).invoke([*CITIES, message, result])
        return {"arguments": json.dumps(call["args"]), "text": final.text}

    def parsed_turn() -> object:
        return {"total": client.with_structured_output(Sum, method="json_schema").invoke(FIRST).total}

    def streamed_error() -> object:
        for _ in slow.stream(FIRST, **ENDLESS):
            pass
        return {"text": "the stream ended without an error"}

    return {act.__name__: act for act in (streamed, second_turn, tool_loop, parsed_turn, streamed_error)}


def connect(url: str) -> ChatOpenAI:
    settings: dict[str, Any] = {"stream_usage": True, "max_retries": 0, **PARAMETERS}
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tools", **settings)


if __name__ == "__main__":
    run({"langchain": scenarios(*map(connect, sys.argv[1:]))})
