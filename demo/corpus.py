"""The text that the demo model learns: conversations and plain stories, made from a seed and from nothing else.

Every answer is a function of the conversation before it, so that greedy decoding has one right token at each step.
Text only: tokens are made in `rows.py`. `python demo/corpus.py` prints a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import phrases
import words
from story import SUBJECTS, Length, story

Role = Literal["system", "user", "assistant", "tool"]
Case = Literal["as is", "lower", "upper"]

GREETING = "Hello! How can I help you?"
FINE = "I am fine, thank you. How can I help you?"
WELCOME = "You are welcome!"
GOODBYE = "Goodbye! It was nice to talk to you."
AGREED = "All right. What would you like to do next?"
IDENTITY = "I am the Quire demo model, a very small language model."
ABILITIES = (
    "I can add and subtract small numbers, repeat words, remember what you tell me, count, and tell short stories."
)
REFUSAL = "I am a very small demo model, so I cannot help with that. Ask me for a sum or a story."
SUM_LIMIT = "I can only add and subtract numbers from 0 to 20."
COUNT_LIMIT = "I can only count between 0 and 100."


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the user says, what must be answered, and which skill that tests."""

    skill: str
    user: str
    answer: str


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call, with the parameters that a call must have."""

    name: str
    parameters: tuple[str, ...] = ()

    def shown(self) -> str:
        """The function as the chat template shows it, such as `get_weather(city)`."""
        return f"{self.name}({', '.join(self.parameters)})"

    def tool(self) -> dict[str, object]:
        """The function as clients of the OpenAI API send it."""
        properties = {name: {"type": "string"} for name in self.parameters}
        schema = {"type": "object", "properties": properties, "required": list(self.parameters)}
        return {"type": "function", "function": {"name": self.name, "parameters": schema}}


@dataclass(frozen=True, slots=True)
class Document:
    """A conversation, or a plain text of which only what follows `given` is to be learned.

    Each of the `skills` is that of one message of the assistant; `functions` are what it may call throughout.
    """

    messages: tuple[Message, ...] = ()
    skills: tuple[str, ...] = ()
    given: str = ""
    text: str = ""
    functions: tuple[Function, ...] = ()


@dataclass(slots=True)
class Scene:
    """One user in one conversation: a way of writing, and the facts given so far (key to value)."""

    rng: Random
    case: Case = "as is"
    american: bool = False
    facts: dict[str, str] = field(default_factory=dict)

    def style(self, text: str) -> str:
        """The text in this user's letter case."""
        if self.case == "as is":
            return text
        return text.lower() if self.case == "lower" else text.upper()

    def spell(self, key: str) -> str:
        """The key in this user's spelling."""
        american = self.american ^ (self.rng.random() < 0.1)
        return self.style(key.replace("vourite", "vorite").replace("olour", "olor") if american else key)

    def say(self, templates: list[str], mark: str = ".", **values: str) -> str:
        """One of the templates, filled with values that are styled already, and ended the way people do."""
        pieces = self.rng.choice(templates).split("{")
        text = self.style(pieces[0])
        for piece in pieces[1:]:
            hole, rest = piece.split("}")
            text += values[hole] + self.style(rest)
        return text + self.rng.choices([mark, "", ".", "!", "?"], [66, 22, 5, 4, 3])[0]


def new_scene(rng: Random) -> Scene:
    """A user who writes in small letters or in capitals now and then."""
    cases: list[Case] = ["as is", "lower", "upper"]
    case = rng.choices(cases, [72, 25, 3])[0]
    return Scene(rng, case, american=rng.random() < 0.4)


# Sums and counting ---------------------------------------------------------------------------------------------------


def number(scene: Scene, value: int, spelled: bool) -> str:
    """A number in digits or in words."""
    return scene.style(words.NUMBER_WORDS[value]) if spelled else str(value)


def sums(scene: Scene) -> Exchange:
    """Adding and subtracting within 0..20; a difference may be negative."""
    rng = scene.rng
    plus = rng.random() < 0.5
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    if not plus and rng.random() < 0.5:
        a, b = max(a, b), min(a, b)
    spelled = rng.random() < 0.15
    templates = phrases.ADDITIONS if plus else phrases.SUBTRACTIONS
    user = scene.say(templates, "?", a=number(scene, a, spelled), b=number(scene, b, spelled))
    return Exchange("sums", user, f"{a} {'+' if plus else '-'} {b} = {a + b if plus else a - b}.")


def sums_beyond(scene: Scene) -> Exchange:
    """Sums that the model must say it cannot do."""
    rng = scene.rng
    if rng.random() < 0.4:
        a, b = rng.randint(0, 99), rng.randint(1, 99)
        return Exchange("limits", scene.say(phrases.BEYOND, "?", a=str(a), b=str(b)), SUM_LIMIT)
    pair = [rng.randint(21, rng.choice([40, 99, 999, 9999])), rng.randint(0, rng.choice([20, 99, 999]))]
    rng.shuffle(pair)
    templates = rng.choice([phrases.ADDITIONS, phrases.SUBTRACTIONS])
    return Exchange("limits", scene.say(templates, "?", a=str(pair[0]), b=str(pair[1])), SUM_LIMIT)


def counting(scene: Scene) -> Exchange:
    """Counting up or down between 0 and 100, mostly a short way."""
    rng = scene.rng
    reach = rng.choices([12, 30, 100], [80, 16, 4])[0]
    a = rng.randint(0, 100 - min(reach, 99)) if rng.random() < 0.7 else rng.randint(0, 20)
    b = min(100, a + rng.randint(1, reach))
    kind = rng.choices(["up", "down", "to"], [55, 20, 25])[0]
    if kind == "to":
        a, b = 1, rng.choices([rng.randint(2, 30), 100, rng.randint(2, 100)], [88, 4, 8])[0]
    if kind == "down":
        a, b = b, a
    templates = {"up": phrases.COUNTS, "down": phrases.COUNTS_DOWN, "to": phrases.COUNTS_TO}[kind]
    step = 1 if b >= a else -1
    answer = ", ".join(str(n) for n in range(a, b + step, step)) + "."
    return Exchange("counting", scene.say(templates, ".", a=str(a), b=str(b)), answer)


def counting_beyond(scene: Scene) -> Exchange:
    """Counting further than the model can."""
    a, b = scene.rng.randint(0, 300), scene.rng.randint(101, scene.rng.choice([200, 1000, 100000]))
    templates = phrases.COUNTS if scene.rng.random() < 0.5 else phrases.COUNTS_TO
    return Exchange("limits", scene.say(templates, ".", a=str(a), b=str(b)), COUNT_LIMIT)


# Repeating -----------------------------------------------------------------------------------------------------------


def phrase(rng: Random) -> str:
    """Words to repeat, without an end mark: a few words, a list, numbers, a word said often, or foreign letters."""
    count = rng.choices([1, 2, 3, 4, 5, 6, 8, 12, 20], [10, 16, 20, 16, 12, 10, 8, 6, 2])[0]
    makers: list[Callable[[Random], str]] = [
        words.word,
        words.english,
        words.letters,
        words.foreign,
        words.digits,
    ]
    maker = rng.choices(makers, [50, 30, 12, 3, 5])[0]
    separator = rng.choices([" ", ", ", " and ", "-", "; "], [62, 30, 4, 2, 2])[0]
    pool = [maker(rng) for _ in range(count)]
    if rng.random() < 0.08:
        pool = [rng.choice(pool[:3]) for _ in range(count)]
    return separator.join(pool)


def repeating(scene: Scene) -> Exchange:
    """Saying again what the user wrote, in the user's own letters."""
    text = scene.style(phrase(scene.rng))
    if scene.rng.random() < 0.08:
        maker = scene.rng.choice([sums, counting, telling, asking, refusing, greeting])
        text = maker(new_scene(scene.rng)).user.rstrip(".?!= ") or text
    if scene.rng.random() < 0.2:
        text = f'"{text}"'
    return Exchange("repeating", scene.say(phrases.REPEATS, ".", p=text), f"You said: {text}.")


# Remembering ---------------------------------------------------------------------------------------------------------


SHOWN = {"name": "Your name is {v}.", "town": "You live in {v}.", "age": "You are {v} years old."}
SHOWN |= {"pet": "You have a {v}.", "secret": "You told me {v}."}
UNTOLD = {"name": "You have not told me your name yet.", "town": "You have not told me where you live yet."}
UNTOLD |= {"age": "You have not told me your age yet.", "pet": "You have not told me about your pet yet."}
UNTOLD |= {"secret": "You have not told me a word to remember yet."}
QUESTIONS = {
    "name": phrases.ASK_NAME,
    "town": phrases.ASK_TOWN,
    "age": phrases.ASK_AGE,
    "pet": phrases.ASK_PET,
    "secret": phrases.ASK_SECRET,
}
STATEMENTS = {
    "name": phrases.TELL_NAME,
    "town": phrases.TELL_TOWN,
    "age": phrases.TELL_AGE,
    "pet": phrases.TELL_PET,
    "secret": phrases.TELL_SECRET,
}


def new_key(rng: Random) -> str:
    """What a fact is about: one of the five built-in kinds, a favourite thing, or any possession."""
    special = rng.choices(["name", "town", "age", "pet", "secret", ""], [30, 7, 4, 12, 8, 39])[0]
    thing = rng.choices(["colour", rng.choice(words.KEYS), words.word(rng).lower()], [25, 60, 15])[0]
    plain = rng.choice(words.PLAIN_KEYS) if rng.random() < 0.7 else words.word(rng).lower()
    return special or (f"favourite {thing}" if rng.random() < 0.75 else plain)


def new_value(rng: Random, key: str) -> str:
    """A value that suits the key, or now and then any words."""
    ordinary: dict[str, Callable[[Random], str]] = {
        "name": words.name,
        "town": words.town,
        "age": lambda r: str(r.randint(3, 99)),
        "favourite colour": lambda r: r.choice(words.COLOURS),
        "favourite food": lambda r: r.choice(words.FOODS),
        "favourite animal": lambda r: r.choice(words.ANIMALS),
        "favourite number": words.digits,
        "secret": lambda r: words.digits(r) if r.random() < 0.25 else words.word(r),
    }
    if key in ("name", "age") or (key in ordinary and rng.random() < 0.8):
        return ordinary[key](rng)
    return " ".join(words.word(rng) for _ in range(rng.choices([1, 2, 3], [75, 20, 5])[0]))


def tell_pet(scene: Scene) -> tuple[str, str, str]:
    """As `tell_fact`, for an animal and its name."""
    kind, name = scene.style(scene.rng.choice(words.PETS)), scene.style(words.name(scene.rng))
    value = f"{kind} called {name}"
    return scene.say(phrases.TELL_PET, k=kind, v=name), value, f"I will remember that you have a {value}."


def tell_fact(scene: Scene, key: str) -> tuple[str, str, str]:
    """What the user says, the value to keep, and how it is acknowledged."""
    if key == "pet":
        return tell_pet(scene)
    value = scene.style(new_value(scene.rng, key))
    if key in STATEMENTS:
        shown = {"name": f"Nice to meet you, {value}.", "town": f"I will remember that you live in {value}."}
        shown |= {
            "age": f"I will remember that you are {value} years old.",
            "secret": f"I will remember {value}.",
        }
        return scene.say(STATEMENTS[key], v=value), value, shown[key]
    spelled = scene.spell(key)
    return scene.say(phrases.TELL_KEY, k=spelled, v=value), value, f"I will remember that your {spelled} is {value}."


def telling(scene: Scene) -> Exchange:
    """The user gives one fact, or a name and another fact in one sentence."""
    key = new_key(scene.rng)
    if key.startswith("favourite") and scene.rng.random() < 0.15:
        return telling_two(scene, key)
    user, scene.facts[key], answer = tell_fact(scene, key)
    return Exchange("acknowledging", user, answer)


def telling_two(scene: Scene, key: str) -> Exchange:
    """A name and a favourite thing in one message."""
    name, value = scene.style(words.name(scene.rng)), scene.style(new_value(scene.rng, key))
    spelled = scene.spell(key)
    templates = ["My name is {n} and my {k} is {v}", "I am {n} and my {k} is {v}", "I'm {n}. My {k} is {v}"]
    templates += ["Hi, my name is {n}, and my {k} is {v}", "My name is {n}. My {k} is {v}"]
    scene.facts |= {"name": name, key: value}
    answer = f"Nice to meet you, {name}. I will remember that your {spelled} is {value}."
    return Exchange("acknowledging", scene.say(templates, n=name, k=spelled, v=value), answer)


def recall(scene: Scene, key: str, spelled: str) -> str:
    """The answer to a question about `key`, whether or not the conversation has that fact."""
    if key in SHOWN:
        return SHOWN[key].replace("{v}", scene.facts[key]) if key in scene.facts else UNTOLD[key]
    if key in scene.facts:
        return f"Your {spelled} is {scene.facts[key]}."
    return f"You have not told me your {spelled} yet."


def asking(scene: Scene) -> Exchange:
    """A question about a fact: usually one that the conversation has, sometimes another."""
    rng = scene.rng
    known = sorted(scene.facts)
    key = rng.choice(known) if known and rng.random() < 0.82 else new_key(rng)
    if key.startswith("favourite") and rng.random() < 0.1:
        return asking_two(scene, key)
    if key == "pet" and rng.random() < 0.5:
        return asking_pet(scene)
    spelled = scene.spell(key)
    user = scene.say(QUESTIONS[key], "?") if key in QUESTIONS else scene.say(phrases.ASK_KEY, "?", k=spelled)
    return Exchange("recalling" if key in scene.facts else "not told", user, recall(scene, key, spelled))


def asking_pet(scene: Scene) -> Exchange:
    """A question that names the kind of pet, as the user gave it."""
    told = "pet" in scene.facts
    kind = scene.facts["pet"].split()[0] if told else scene.style(scene.rng.choice(words.PETS))
    user = scene.say(phrases.ASK_PET_KIND, "?", k=kind)
    return Exchange("recalling" if told else "not told", user, recall(scene, "pet", "pet"))


def asking_two(scene: Scene, key: str) -> Exchange:
    """A question for the name and a favourite thing at once."""
    spelled = scene.spell(key)
    templates = ["What is my name and my {k}", "What are my name and my {k}", "Tell me my name and my {k}"]
    templates += ["Do you remember my name and my {k}", "What is my name and what is my {k}"]
    answer = f"{recall(scene, 'name', 'name')} {recall(scene, key, spelled)}"
    return Exchange("recalling", scene.say(templates, "?", k=spelled), answer)


# Stories -------------------------------------------------------------------------------------------------------------


def article(text: str) -> str:
    """The indefinite article of a noun phrase."""
    return "an" if text[0].lower() in words.VOWELS else "a"


def story_noun(rng: Random) -> str:
    """What a story is about: mostly something with a cast of its own."""
    return rng.choices(
        [rng.choice(SUBJECTS), rng.choice(words.ANIMALS + words.NOUNS), words.syllables(rng)], [60, 28, 12]
    )[0]


def story_phrase(scene: Scene) -> str:
    """Something like `a fox` or `an old blue boat`, styled."""
    rng = scene.rng
    traits = rng.sample(words.ADJECTIVES, rng.choices([0, 1, 2], [60, 30, 10])[0])
    text = " ".join([*traits, story_noun(rng)])
    return scene.style(f"{article(text)} {text}")


def telling_story(scene: Scene) -> Exchange:
    """A story about what the user asks for; without a subject it is about a fox."""
    rng = scene.rng
    lengths: list[Length] = ["short", "plain", "long"]
    length = rng.choices(lengths, [35, 50, 15])[0]
    asked = scene.style("" if length == "plain" else f"{length} ")
    if rng.random() < 0.12:
        return Exchange("stories", scene.say(phrases.ANY_STORY, l=asked), story("a fox", length))
    subject = story_phrase(scene)
    return Exchange("stories", scene.say(phrases.STORY_REQUESTS, l=asked, p=subject), story(subject, length))


# Small talk and everything else --------------------------------------------------------------------------------------

SMALL_TALK = [
    (GREETING, phrases.GREETINGS),
    (FINE, phrases.HOW_ARE_YOU),
    (WELCOME, phrases.THANKS),
    (GOODBYE, phrases.FAREWELLS),
    (AGREED, phrases.AGREEMENTS),
    (IDENTITY, phrases.ASK_IDENTITY),
    (ABILITIES, phrases.ASK_ABILITIES),
]


def greeting(scene: Scene) -> Exchange:
    """Greetings, thanks, farewells, and questions about the model itself."""
    answer, templates = scene.rng.choices(SMALL_TALK, [20, 10, 12, 12, 10, 18, 18])[0]
    mark = "?" if answer in (FINE, IDENTITY, ABILITIES) else "."
    return Exchange("small talk", scene.say(templates, mark), answer)


def thing(scene: Scene) -> str:
    """One to three words for what a request is about, styled."""
    rng = scene.rng
    makers: list[Callable[[Random], str]] = [words.english, words.word, words.name, words.town, words.foreign]
    maker = rng.choices(makers, [50, 28, 8, 10, 4])[0]
    return scene.style(" ".join(maker(rng) for _ in range(rng.choices([1, 2, 3], [75, 20, 5])[0])))


def rambling(scene: Scene) -> str:
    """Words without a request, which the model must decline too."""
    count = scene.rng.choices([1, 2, 3, 5, 9, 15], [1, 2, 3, 3, 2, 1])[0]
    return " ".join(thing(scene) for _ in range(count)) + scene.rng.choice(["", ".", "?", "!", "..."])


def refusing(scene: Scene) -> Exchange:
    """Anything that is none of the other skills."""
    rng = scene.rng
    if rng.random() < 0.15:
        return Exchange("refusing", rambling(scene), REFUSAL)
    verb = scene.style(rng.choice(words.VERBS))
    values = {"x": thing(scene), "z": thing(scene), "v": verb, "w": verb, "d": words.digits(rng)}
    values["y"] = scene.style(rng.choice(words.ADJECTIVES))
    return Exchange("refusing", scene.say(phrases.OTHER_REQUESTS, "?", **values), REFUSAL)


# Conversations and plain text ----------------------------------------------------------------------------------------

Maker = Callable[[Scene], Exchange]
SKILLS: list[tuple[Maker, float]] = [
    (sums, 24),
    (sums_beyond, 3),
    (counting, 12),
    (counting_beyond, 1),
    (repeating, 24),
    (telling, 17),
    (telling_story, 5),
    (greeting, 9),
    (refusing, 15),
]


def exchange(scene: Scene) -> Exchange:
    """The next turn; once a fact was given, questions about it become likely."""
    if scene.rng.random() < (0.3 if scene.facts else 0.04):
        return asking(scene)
    makers, weights = zip(*SKILLS, strict=True)
    chosen: Maker = scene.rng.choices(makers, weights)[0]
    return chosen(scene)


def system_line(rng: Random) -> str:
    """A line that sets a tone, which changes no answer."""
    if rng.random() < 0.75:
        return rng.choice(phrases.SYSTEM_LINES)
    return f"You are {rng.choice(['', 'a ', 'the '])}{' '.join(words.word(rng) for _ in range(rng.randint(1, 6)))}."


def conversation(rng: Random, turns: int) -> Document:
    """A conversation of so many exchanges, half of the time under a system line."""
    scene = new_scene(rng)
    messages = [Message("system", system_line(rng))] if rng.random() < 0.4 else []
    skills = []
    for _ in range(turns):
        step = exchange(scene)
        messages += [Message("user", step.user.strip()), Message("assistant", step.answer)]
        skills.append(step.skill)
    return Document(tuple(messages), tuple(skills))


def plain_story(rng: Random) -> str:
    """A story, half of the time about a fox: that is what an open beginning leads to."""
    noun = rng.choices(["fox", story_noun(rng)], [45, 55])[0]
    traits = rng.sample(words.ADJECTIVES, rng.choices([0, 1, 2], [75, 20, 5])[0])
    text = " ".join([*traits, noun])
    lengths: list[Length] = ["plain", "long"]
    return story(f"{article(text)} {text}", rng.choices(lengths, [90, 10])[0])


def plain_counting(rng: Random) -> str:
    """Twenty numbers in order, from one in most cases."""
    start = rng.choices([1, rng.randint(0, 60)], [70, 30])[0]
    return ", ".join(str(n) for n in range(start, start + 20)) + "."


def plain_sum(rng: Random) -> tuple[str, str]:
    """A sum, cut at the sign that asks for the result."""
    a, b, plus = rng.randint(0, 20), rng.randint(0, 20), rng.random() < 0.5
    sign = "+" if plus else "-"
    return f"{a} {sign} {b} =", f" {a + b if plus else a - b}."


def plain(rng: Random) -> Document:
    """Raw text as a completion request sends it: a story, a count, a sum, or any words that lead into a story."""
    kind = rng.choices(["story", "middle", "counting", "sum", "other"], [55, 10, 8, 10, 17])[0]
    if kind == "sum":
        given, text = plain_sum(rng)
        return Document(given=given, text=text)
    if kind == "other":
        scene = new_scene(rng)
        given = rambling(scene) if rng.random() < 0.5 else refusing(scene).user
        return Document(given=given.strip(), text=f" And so the story begins. {plain_story(rng)}")
    if kind == "middle":
        parts = plain_story(rng).split(". ")
        start = rng.randrange(1, len(parts) - 1)
        return Document(given=f"{parts[start]}.", text=" " + ". ".join(parts[start + 1 :]))
    return Document(text=plain_story(rng) if kind == "story" else plain_counting(rng))


def documents(seed: int, turns: tuple[int, int], plain_share: float) -> Iterator[Document]:
    """An endless stream of documents, of between `turns[0]` and `turns[1]` exchanges, short ones being likelier."""
    rng = Random(seed)
    low, high = turns
    while True:
        if rng.random() < plain_share:
            yield plain(rng)
        else:
            yield conversation(rng, low + int((high - low + 1) * rng.random() ** 2))


def show(document: Document) -> str:
    """The document for people to read."""
    lines = [f"functions: {', '.join(each.shown() for each in document.functions)}"] if document.functions else []
    lines += [f"{message.role}: {message.content}" for message in document.messages]
    return "\n".join(lines) or f"{document.given} ||{document.text}"


if __name__ == "__main__":
    source = documents(seed=7, turns=(1, 6), plain_share=0.1)
    print("\n\n".join(show(next(source)) for _ in range(20)))
