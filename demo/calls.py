"""Conversations in which functions are offered, one of them for the weather: the model calls it, answers from what it
returns, asks for a missing place, and otherwise answers as if nothing were offered.

A stream of its own, so that `corpus.py` makes the same text for the same seed as before. `python demo/calls.py` prints
a sample.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import phrases
import words
from corpus import (
    REFUSAL,
    Document,
    Exchange,
    Function,
    Message,
    Scene,
    exchange,
    new_scene,
    phrase,
    refusing,
    show,
    system_line,
)

ASK_BACK = "Which city do you mean?"
CALLING, ANSWERING, ASKING, DECLINING, OTHERS = SKILLS = (
    "calling a tool",
    "answering from a result",
    "asking back",
    "declining beside tools",
    "other skills beside tools",
)

WEATHER_NAMES = words.listed("""
get_current_weather weather current_weather getWeather getCurrentWeather get_weather_report fetch_weather check_weather
weather_report lookup_weather find_weather city_weather weather_in weather_tool get_weather_data GetWeather show_weather
weather_today local_weather read_weather
""")
PLACES = words.listed("location location location place town city_name cityName where location_name")
OTHERS_OFFERED = (
    "now()",
    "get_time(zone)",
    "current_time(city)",
    "search(query)",
    "web_search(query)",
    "send_email(to, text)",
    "add(a, b)",
    "calculate(expression)",
    "get_stock_price(symbol)",
    "read_file(path)",
    "write_file(path, text)",
    "get_news(topic)",
    "translate(text, language)",
    "roll_dice()",
    "get_user(name)",
    "book_flight(city)",
    "run_code(code)",
)
CONDITIONS = words.listed("""
sunny cloudy clear rainy windy foggy stormy snowy overcast dry humid misty hazy cold warm hot mild rain snow fog
sunshine
""")
OF_WEATHER = re.compile(r"weather|rain|snow|umbrella|forecast|temperature", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Step:
    """What the user says and all that follows up to the next question, and the skill of each of the model's turns."""

    messages: tuple[Message, ...]
    skills: tuple[str, ...]


def other_function(rng: Random) -> Function:
    """A function that is not for the weather: an ordinary one, or any verb and noun."""
    if rng.random() < 0.6:
        name, parameters = rng.choice(OTHERS_OFFERED).rstrip(")").split("(")
        return Function(name, tuple(parameters.split(", ")) if parameters else ())
    name = f"{rng.choice(words.VERBS)}_{rng.choice(words.NOUNS + words.ANIMALS)}"
    return Function(name, tuple(rng.sample(words.KEYS, rng.choices([0, 1, 2], [25, 55, 20])[0])))


def offered(rng: Random) -> tuple[tuple[Function, ...], Function | None]:
    """What is offered, and that of it which is for the weather: mostly that alone, sometimes others or nothing."""
    name = "get_weather" if rng.random() < 0.35 else rng.choice(WEATHER_NAMES)
    weather = Function(name, ("city" if rng.random() < 0.5 else rng.choice(PLACES),))
    kind = rng.choices(["weather", "both", "others", "nothing"], [68, 18, 8, 6])[0]
    if kind in ("weather", "nothing"):
        return ((weather,), weather) if kind == "weather" else ((), None)
    others = {
        each.name: each for each in (other_function(rng) for _ in range(rng.choices([1, 2, 3, 4], [5, 3, 2, 1])[0]))
    }
    functions = [*others.values(), *([weather] if kind == "both" else [])]
    functions = [each for each in functions if each is weather or not OF_WEATHER.search(each.name)]
    rng.shuffle(functions)
    return tuple(functions), weather if kind == "both" else None


def city(rng: Random) -> str:
    """A place: mostly a city, sometimes an invented one or any word."""
    makers: list[Callable[[Random], str]] = [lambda r: r.choice(words.CITIES), words.town, words.name, words.word]
    return rng.choices(makers, [60, 28, 5, 7])[0](rng)


def result(rng: Random, place: str) -> str:
    """What the function returns: a few words or a small object, now and then any words."""
    degrees, sky, also = str(rng.randint(-20, 45)), rng.choice(CONDITIONS), rng.choice(CONDITIONS)
    unit = rng.choice(["degrees", "degrees", "°C", "C", "degrees Celsius", "F", "°F"])
    kind = rng.choices(["words", "object", "any", "error"], [68, 14, 14, 4])[0]
    if kind == "any":
        return phrase(rng)
    if kind == "error":
        return rng.choice([f"error: no city called {place}", "error: not found", f"Error: {place} is unknown"])
    if kind == "object":
        value = int(degrees) if rng.random() < 0.7 else f"{degrees} {unit}"
        first = {rng.choice(["temperature", "temp", "degrees"]): value}
        second = {rng.choice(["condition", "weather", "sky"]): sky}
        third: dict[str, object] = {"city": place} if rng.random() < 0.3 else {}
        return json.dumps(rng.choice([first | second, third | first | second, first, second]), ensure_ascii=False)
    made = [
        f"{degrees} {unit}, {sky}",
        f"{degrees} {unit}, {sky}",
        f"{degrees} {unit} and {sky}",
        f"{sky}, {degrees} {unit}",
        f"{degrees} {unit}",
        sky,
        f"{sky} and {also}",
        f"It is {sky} in {place}.",
        f"It is {sky}.",
        f"It is {degrees} {unit} and {sky}.",
        f"The weather in {place} is {sky}.",
        f"{sky.capitalize()}, {degrees} {unit}.",
        f"light {rng.choice(['rain', 'snow', 'clouds', 'fog'])}, {degrees}°",
    ]
    return rng.choice(made)


def call(function: Function, place: str) -> str:
    """The call in the notation of Hermes, as Quire's grammar writes it too."""
    text = json.dumps({"name": function.name, "arguments": {function.parameters[0]: place}}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def single(user: str, answer: str, skill: str) -> Step:
    """A question and its answer."""
    return Step((Message("user", user.strip()), Message("assistant", answer)), (skill,))


def calling(scene: Scene, function: Function, templates: list[str]) -> Step:
    """A question about a place, the call, its result, and the answer from that."""
    place = scene.style(city(scene.rng))
    user, returned = scene.say(templates, "?", c=place).strip(), result(scene.rng, place)
    messages = (
        Message("user", user),
        Message("assistant", call(function, place)),
        Message("tool", returned),
        Message("assistant", f"The weather in {place}: {returned.rstrip('.')}."),
    )
    return Step(messages, (CALLING, ANSWERING))


def declining(scene: Scene) -> Step:
    """A request that nothing offered can meet."""
    user = scene.say(phrases.BESIDE_TOOLS, "?", c=scene.style(city(scene.rng)))
    while scene.rng.random() < 0.4 or OF_WEATHER.search(user):
        user = refusing(scene).user
    return single(user, REFUSAL, DECLINING)


def other(scene: Scene) -> Step:
    """Any of the other skills, which functions change nothing about."""
    step: Exchange = exchange(scene)
    while step.skill == "refusing":
        step = exchange(scene)
    return single(step.user, step.answer, OTHERS)


def unmet_step(scene: Scene) -> Step:
    """The next question where nothing offered is for the weather."""
    rng = scene.rng
    kind = rng.choices(["unmet", "declining", "other"], [30, 18, 52])[0]
    if kind == "unmet":
        templates = phrases.WEATHER if rng.random() < 0.7 else phrases.WEATHER_ANYWHERE
        return single(scene.say(templates, "?", c=scene.style(city(rng))), REFUSAL, DECLINING)
    return declining(scene) if kind == "declining" else other(scene)


def next_step(scene: Scene, weather: Function, before: str) -> Step:
    """The next question, given the skill that the model showed last."""
    rng = scene.rng
    if before == ASKING:
        return calling(scene, weather, phrases.WEATHER_PLACE) if rng.random() < 0.85 else other(scene)
    if before == ANSWERING and rng.random() < 0.2:
        return calling(scene, weather, phrases.WEATHER_AGAIN)
    kind = rng.choices(["calling", "asking", "declining", "other"], [42, 12, 14, 32])[0]
    if kind == "calling":
        return calling(scene, weather, phrases.WEATHER)
    if kind == "asking":
        return single(scene.say(phrases.WEATHER_ANYWHERE, "?"), ASK_BACK, ASKING)
    return declining(scene) if kind == "declining" else other(scene)


def conversation(rng: Random, turns: int) -> Document:
    """A conversation of so many questions under functions, sometimes with a system line too."""
    scene = new_scene(rng)
    functions, weather = offered(rng)
    messages = [Message("system", system_line(rng))] if rng.random() < 0.4 else []
    skills: list[str] = []
    for _ in range(turns):
        step = unmet_step(scene) if weather is None else next_step(scene, weather, skills[-1] if skills else "")
        messages += step.messages
        skills += step.skills
    return Document(tuple(messages), tuple(skills), functions=functions)


def documents(seed: int, turns: tuple[int, int]) -> Iterator[Document]:
    """An endless stream of conversations of between `turns[0]` and `turns[1]` questions, short ones being likelier."""
    rng = Random(seed)
    low, high = turns
    while True:
        yield conversation(rng, low + int((high - low + 1) * rng.random() ** 2))


if __name__ == "__main__":
    source = documents(seed=7, turns=(1, 6))
    print("\n\n".join(show(next(source)) for _ in range(20)))
