"""The stories: each is a function of what it is about and of how long it should be, and of nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from words import listed

Length = Literal["short", "plain", "long"]

SUBJECTS = listed("""
fox owl bear wolf mouse rabbit hedgehog cat dog horse duck frog turtle lion tiger elephant monkey sheep
squirrel otter dragon bee whale penguin robot boat train star cloud tree king queen girl boy wizard pirate
""")

HEROES = listed("""
Ruby Olive Bruno Wanda Pip Clover Hazel Milo Rex Star Daisy Fern Tilly Leo Tara Ella Momo Wool Nutty River
Ember Honey Bella Percy Bolt Sunny Toot Twinkle Misty Willow Arlo Rosa Anna Ben Merlin Jack
""")

PLACES = [
    "in a green forest",
    "near a quiet river",
    "on a high hill",
    "beside the blue sea",
    "in a small village",
    "under an old bridge",
    "at the end of a long road",
]
TREASURES = ["a golden key", "a red lantern", "a silver bell", "a warm blanket", "a bright map"]
FRIENDS = ["shy mouse", "wise crow", "lost lamb", "merry baker", "tired sailor", "small bird"]
LESSONS = [
    "a good friend is the best thing to find",
    "small steps make a long way",
    "sharing makes everything better",
    "it is never too late to help",
]


@dataclass(frozen=True, slots=True)
class Cast:
    """The characters and places of a story."""

    hero: str
    place: str
    treasure: str
    friend: str
    lesson: str


def cast_for(noun: str) -> Cast:
    """The cast that belongs to a subject; subjects outside the list share one cast."""
    known = noun.lower() in SUBJECTS
    index = SUBJECTS.index(noun.lower()) if known else 0
    return Cast(
        hero=HEROES[index] if known else "Pim",
        place=PLACES[index % len(PLACES)],
        treasure=TREASURES[index % len(TREASURES)],
        friend=FRIENDS[index % len(FRIENDS)],
        lesson=LESSONS[index % len(LESSONS)],
    )


def sentences(phrase: str, length: Length) -> list[str]:
    """The story about `phrase`, one sentence an item; of `a small grey owl`, the last word decides the cast."""
    noun = phrase.rsplit(maxsplit=1)[-1]
    cast = cast_for(noun)
    opening = [
        f"Once upon a time there was {phrase}.",
        f"The {noun} was called {cast.hero} and lived {cast.place}.",
    ]
    search = [f"One day {cast.hero} went out to look for {cast.treasure}."]
    meeting = [
        f"On the way {cast.hero} met a {cast.friend}.",
        '"Can you help me?" asked the ' + noun + ".",
        f'"Yes," said the {cast.friend}, "let us go together."',
    ]
    journey = [
        "They walked all day and sang a song.",
        "In the evening it began to rain, so they sat under a big tree and shared some bread.",
        f'"Are you afraid of the dark?" asked the {cast.friend}.',
        f'"Not when you are here," said {cast.hero}.',
        "In the morning the sun was warm and the path was dry.",
        f"Behind a round stone {cast.hero} saw something shine.",
    ]
    ending = [
        f"At last they found {cast.treasure} and took it home.",
        f"That night {cast.hero} learned that {cast.lesson}.",
        "The end.",
    ]
    middle = {"short": search, "plain": search + meeting, "long": search + meeting + journey}[length]
    return opening + middle + ending


def story(phrase: str, length: Length = "plain") -> str:
    """The story as one line of text."""
    return " ".join(sentences(phrase, length))
