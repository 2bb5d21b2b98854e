"""An agent of LangChain that calls a tool, streams its answer and ends with an object: ``python langchain_agent.py``.

Install ``langchain`` and ``langchain-openai``. Ask ``quire serve Qwen/Qwen3-0.6B --served-model-name qwen3``, or set
OPENAI_BASE_URL, OPENAI_API_KEY and MODEL.
"""

import os
from collections.abc import Callable

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Report(BaseModel, extra="forbid"):
    """The form of the answer."""

    city: str
    degrees: int


def weather(city: str) -> str:
    """The weather in a city."""
    return f"It is 21 degrees in {city}."


@wrap_model_call
def one_round(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """Forces calls first and the answer then: a small model might invent the answer, or call for ever."""
    called = any(message.type == "tool" for message in request.messages)
    return handler(request.override(model_settings={"tool_choice": "none" if called else "required"}))


model = ChatOpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    model=os.environ.get("MODEL", "qwen3"),
    max_tokens=1000,
    model_kwargs={"parallel_tool_calls": False},
    extra_body={"chat_template_kwargs": {"enable_thinking": False}},
)
agent = create_agent(model, tools=[weather], middleware=[one_round], response_format=ProviderStrategy(Report))
question = {"messages": [{"role": "user", "content": "What is the weather in Rome?"}]}
for mode, part in agent.stream(question, stream_mode=["messages", "values"]):
    if mode == "values":
        state = part  # after each step
        continue
    token, metadata = part
    if metadata["langgraph_node"] == "model":
        print(token.text, end="", flush=True)
print()
print(state["structured_response"])
