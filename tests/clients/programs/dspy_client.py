"""DSPy's LM: ``dspy_client.py URL``. Its adapters need a model that follows a format, as the demo model does not."""

import sys
from collections.abc import Callable

import dspy
from scenarios import FIRST, PARAMETERS, SECOND, run


def scenarios(url: str) -> dict[str, Callable[[], object]]:
    client = dspy.LM("openai/tools", api_base=f"{url}/v1", api_key="none", cache=False, num_retries=0, **PARAMETERS)

    def whole() -> object:
        (text,) = client(messages=FIRST)
        return {"text": text}

    def second_turn() -> object:
        (text,) = client(messages=FIRST)
        (answer,) = client(messages=[*FIRST, {"role": "assistant", "content": text}, SECOND])
        return {"text": answer}

    return {act.__name__: act for act in (whole, second_turn)}


if __name__ == "__main__":
    run({"dspy": scenarios(sys.argv[1])})
