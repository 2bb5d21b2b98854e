"""LiteLLM's SDK, and its proxy spoken to by the openai package: ``litellm_client.py URL SLOW_URL [PROXY_URL]``."""

import sys
from collections.abc import Callable

import litellm
from openai import OpenAI
from scenarios import CITIES, ENDLESS, FIRST, FORCED, PARAMETERS, SECOND, TOOL, run, with_result

litellm.suppress_debug_info = True
litellm.drop_params = False


def sdk(prefix: str, url: str) -> Callable[..., object]:
    def complete(**fields: object) -> object:
        return litellm.completion(
            model=f"{prefix}/tools", api_base=f"{url}/v1", api_key="none", num_retries=0, **{**PARAMETERS, **fields}
        )

    return complete


def proxied(prefix: str, url: str, key: str) -> Callable[..., object]:
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)

    def complete(**fields: object) -> object:
        return client.chat.completions.create(model=f"{prefix}-tools", **{**PARAMETERS, **fields})

    return complete


def scenarios(complete: Callable[..., object], slow: Callable[..., object]) -> dict[str, Callable[[], object]]:
    def streamed() -> object:
        text, usage = "", None
        chunks = complete(messages=FIRST, stream=True, stream_options={"include_usage": True})
        for chunk in chunks:
            usage = getattr(chunk, "usage", None) or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        return {"text": text, "usage": [usage.prompt_tokens, usage.completion_tokens]}

    def second_turn() -> object:
        message = complete(messages=FIRST).choices[0].message
        answer = complete(messages=[*FIRST, message.model_dump(), SECOND])
        return {"text": answer.choices[0].message.content}

    def tool_loop() -> object:
        message = complete(messages=CITIES, tools=[TOOL], **FORCED).choices[0].message
        answer = complete(messages=with_result(message.model_dump(), message.tool_calls[0].id), tools=[TOOL])
        return {"arguments": message.tool_calls[0].function.arguments, "text": answer.choices[0].message.content}

    def streamed_error() -> object:
        for _ in slow(messages=FIRST, stream=True, **ENDLESS):
            pass
        return {"text": "the stream ended without an error"}

    return {
        "streamed": streamed,
        "second_turn": second_turn,
        "tool_loop": tool_loop,
        "streamed_error": streamed_error,
    }


if __name__ == "__main__":
    url, slow_url, *proxy = sys.argv[1:]
    found = {}
    for prefix in ("openai", "hosted_vllm"):
        if proxy:
            complete, slow = (proxied(f"{kind}{prefix}", proxy[0], "sk-proxy") for kind in ("", "slow-"))
        else:
            complete, slow = sdk(prefix, url), sdk(prefix, slow_url)
        found[prefix] = scenarios(complete, slow)
    run(found)
