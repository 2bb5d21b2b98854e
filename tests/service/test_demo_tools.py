"""The demo model with functions, as any client of the OpenAI API uses it: nothing forces what it calls."""

import json
from typing import Any

import pytest
from openai import OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.service.conftest import MODEL, Stack

REFUSAL = "I am a very small demo model, so I cannot help with that. Ask me for a sum or a story."


def function(name: str, *parameters: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {each: {"type": "string", "description": f"The {each}."} for each in parameters},
        "required": list(parameters),
    }
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": schema}}


class Chat:
    """A conversation under some tools, whole or as streams."""

    def __init__(self, client: OpenAI, tools: list[dict[str, Any]], stream: bool) -> None:
        self.client, self.tools, self.stream = client, tools, stream
        self.messages: list[Any] = []

    def ask(self, text: str) -> Any:
        self.messages.append({"role": "user", "content": text})
        return self.go_on()

    def go_on(self) -> Any:
        """The next choice, whose message joins the conversation."""
        fields: Any = {"model": MODEL, "messages": self.messages, "tools": self.tools, "temperature": 0}
        if self.stream:
            state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
            for chunk in self.client.chat.completions.create(**fields, stream=True):
                state.handle_chunk(chunk)
            choice: Any = state.get_final_completion().choices[0]
        else:
            choice = self.client.chat.completions.create(**fields).choices[0]
        self.messages.append(choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        return choice

    def called(self, choice: Any, name: str, **arguments: str) -> str:
        """The id of the only call, which has to be this one."""
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
        return str(call.id)

    def returns(self, call_id: str, result: str) -> str:
        """What the model says to the result."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        choice = self.go_on()
        assert (choice.finish_reason, choice.message.tool_calls or []) == ("stop", [])
        return str(choice.message.content)

    def says(self, text: str) -> str:
        """The answer to a question that needs no function."""
        choice = self.ask(text)
        assert (choice.finish_reason, choice.message.tool_calls or []) == ("stop", [])
        return str(choice.message.content)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def chat(stack: Stack, request: pytest.FixtureRequest) -> Chat:
    return Chat(stack.openai, [function("get_weather", "city")], request.param)


def test_it_calls_the_function_and_answers_from_the_result(chat: Chat) -> None:
    call_id = chat.called(chat.ask("What is the weather in Rome?"), "get_weather", city="Rome")
    assert chat.returns(call_id, "21 degrees, sunny") == "The weather in Rome: 21 degrees, sunny."
    again = chat.called(chat.ask("And in Oslo?"), "get_weather", city="Oslo")
    assert again != call_id
    assert chat.returns(again, "light rain") == "The weather in Oslo: light rain."


@pytest.mark.parametrize(("name", "place"), [("get_current_weather", "location"), ("weather", "city")])
def test_name_and_parameter_are_those_that_were_offered(chat: Chat, name: str, place: str) -> None:
    chat.tools = [function("get_time", "zone"), function(name, place)]
    call_id = chat.called(chat.ask("What's the weather like in Boston today?"), name, **{place: "Boston"})
    assert chat.returns(call_id, '{"temperature": 8}') == 'The weather in Boston: {"temperature": 8}.'


def test_it_asks_for_a_missing_city(chat: Chat) -> None:
    assert chat.says("What is the weather?") == "Which city do you mean?"
    chat.called(chat.ask("Paris"), "get_weather", city="Paris")


def test_other_questions_are_answered_as_without_functions(chat: Chat) -> None:
    assert chat.says("My name is Mira.") == "Nice to meet you, Mira."
    assert chat.says("What is 7 plus 5?") == "7 + 5 = 12."
    assert chat.says("What is the capital of Peru?") == REFUSAL
    assert chat.says("What is my name?") == "Your name is Mira."


def test_without_a_function_for_the_weather_it_declines(chat: Chat) -> None:
    chat.tools = [function("get_time", "zone")]
    assert chat.says("What is the weather in Rome?") == REFUSAL


def test_a_question_with_tool_choice_none_is_declined(stack: Stack) -> None:
    fields: Any = {"model": MODEL, "tools": [function("get_weather", "city")], "tool_choice": "none", "temperature": 0}
    asked: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    (choice,) = stack.openai.chat.completions.create(messages=asked, **fields).choices
    assert choice.message.content == REFUSAL
