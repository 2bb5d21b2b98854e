"""smolagents' OpenAIModel: ``smolagents_client.py URL SLOW_URL``."""

import sys
from collections.abc import Callable

from scenarios import ENDLESS, FIRST, PARAMETERS, SECOND, run
from smolagents import ChatMessage, OpenAIModel


def scenarios(client: OpenAIModel, slow: OpenAIModel) -> dict[str, Callable[[], object]]:
    first = [ChatMessage(**message) for message in FIRST]

    def streamed() -> object:
        text, usage = "", None
        for delta in client.generate_stream(first):
            text += delta.content or ""
            usage = delta.token_usage or usage
        return {"text": text, "usage": [usage.input_tokens, usage.output_tokens]}

    def second_turn() -> object:
        message = client.generate(first)
        return {"text": client.generate([*first, message, ChatMessage(**SECOND)]).content}

    def streamed_error() -> object:
        for _ in slow.generate_stream(first):
            pass
        return {"text": "the stream ended without an error"}

    return {act.__name__: act for act in (streamed, second_turn, streamed_error)}


def connect(url: str, parameters: dict[str, object]) -> OpenAIModel:
    return OpenAIModel("tools", api_base=f"{url}/v1", api_key="none", client_kwargs={"max_retries": 0}, **parameters)


if __name__ == "__main__":
    url, slow_url = sys.argv[1:]
    # What is given at first holds against what is given with a request.
    run({"smolagents": scenarios(connect(url, PARAMETERS), connect(slow_url, {**PARAMETERS, **ENDLESS}))})
