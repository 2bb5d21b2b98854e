"""Measures a finished folder the way a user meets it: through transformers, on conversations it was not trained on.

Uses the corpus and the folder only, not the code that trains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import calls
import torch
from corpus import Document, Function, Message, documents
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

HELD_OUT_SEED = 271_828_182
SAMPLES = 60
NARROW = 0.5
ANSWER_LIMIT = 640


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation up to a question, the one right answer, and what the model may call."""

    skill: str
    history: tuple[Message, ...]
    answer: str
    functions: tuple[Function, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """What was generated, and how far each token stood above its rival, in logits."""

    text: str
    margins: list[float]


def questions(document: Document) -> Iterator[Case]:
    """Every exchange of the conversation, as a question with the true history before it."""
    ends = [i for i, message in enumerate(document.messages) if message.role == "assistant"]
    for skill, end in zip(document.skills, ends, strict=True):
        yield Case(skill, document.messages[:end], document.messages[end].content, document.functions)


def cases(samples: int, seed: int = HELD_OUT_SEED) -> dict[str, list[Case]]:
    """The first `samples` questions of each skill in a stream of conversations of up to eight exchanges."""
    return dict(sorted(first_of_each(documents(seed, turns=(1, 8), plain_share=0.0), samples).items()))


def tool_cases(samples: int, seed: int = HELD_OUT_SEED + 2) -> dict[str, list[Case]]:
    """The same of conversations in which functions are offered."""
    stream = (document for document in calls.documents(seed, turns=(1, 6)) if document.functions)
    chosen = first_of_each(stream, samples)
    return {skill: chosen[skill] for skill in calls.SKILLS}


def first_of_each(stream: Iterator[Document], samples: int) -> dict[str, list[Case]]:
    """The first `samples` questions of each skill."""
    chosen: dict[str, list[Case]] = defaultdict(list)
    for document in islice(stream, 100 * samples):
        for case in questions(document):
            if len(chosen[case.skill]) < samples:
                chosen[case.skill].append(case)
    return chosen


def long_cases(samples: int, seed: int = HELD_OUT_SEED + 1) -> list[Case]:
    """The last question of conversations of 25 to 45 exchanges, most of them 700 to 1,600 tokens long."""
    stream = documents(seed, turns=(25, 45), plain_share=0.0)
    return [list(questions(document))[-1] for document in islice(stream, samples)]


def margins(scores: Iterable[Tensor], row: int, length: int) -> list[float]:
    """Top logit less the second, for the first `length` tokens of one row."""
    best = (score[row].float().topk(2).values for score in islice(scores, length))
    return [float(first - second) for first, second in best]


class Folder:
    """The finished model behind one function: `replies`."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    def prompt(self, case: Case) -> str:
        """The text that the chat template makes of a conversation before its next answer."""
        turns = [{"role": message.role, "content": message.content} for message in case.history]
        settings = {"tools": [function.tool() for function in case.functions] or None}
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **settings))

    def replies(self, prompts: list[str], limit: int = ANSWER_LIMIT) -> list[Reply]:
        """Greedy continuations of one padded batch, up to the end of turn."""
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        settings = {"max_new_tokens": limit, "do_sample": False, "output_logits": True}
        with torch.inference_mode():
            output = self.model.generate(**batch, **settings, return_dict_in_generate=True)
        new = output.sequences[:, batch["input_ids"].shape[1] :]
        return [self.reply(tokens, output.logits, row) for row, tokens in enumerate(new)]

    def reply(self, tokens: Tensor, scores: tuple[Tensor, ...], row: int) -> Reply:
        """One row of the output, cut after its end of turn."""
        ended = (tokens == self.tokenizer.eos_token_id).nonzero()
        length = int(ended[0]) + 1 if len(ended) else len(tokens)
        text = self.tokenizer.decode(tokens[:length], skip_special_tokens=True)
        return Reply(text, margins(scores, row, length))

    def answers(self, asked: list[Case], rows: int) -> list[Reply]:
        """Replies in the order of the cases, generated `rows` at a time."""
        prompts = [self.prompt(case) for case in asked]
        return [reply for i in range(0, len(prompts), rows) for reply in self.replies(prompts[i : i + rows])]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table."""

    skill: str
    asked: list[Case]
    single: list[Reply]
    half: list[Reply]

    def right(self, replies: list[Reply]) -> int:
        """How many replies are the one right answer, letter by letter."""
        return sum(case.answer == reply.text for case, reply in zip(self.asked, replies, strict=True))

    def same(self) -> int:
        """How many replies do not depend on the precision and the batch."""
        return sum(one.text == other.text for one, other in zip(self.single, self.half, strict=True))

    def mistakes(self) -> list[str]:
        """Each wrong answer in bfloat16, beside the right one."""
        pairs = zip(self.asked, self.half, strict=True)
        wrong = [(case, reply.text) for case, reply in pairs if case.answer != reply.text]
        return [f"{self.skill}: {c.history[-1].content!r}\n  right {c.answer!r}\n  given {text!r}" for c, text in wrong]

    def text(self) -> str:
        """The line in Markdown."""
        steps = [margin for reply in self.half for margin in reply.margins]
        narrow = sum(margin < NARROW for margin in steps)
        counts = [
            f"{count}/{len(self.asked)}" for count in (self.right(self.single), self.right(self.half), self.same())
        ]
        return f"| {self.skill} | {' | '.join(counts)} | {len(steps)} | {narrow} | {min(steps):.2f} |"


HEADER = """| skill | right in float32 | right in bfloat16 | same text in both | tokens | margin below 0.5 | smallest |
|---|---|---|---|---|---|---|"""


def raw_check(folder: Folder) -> list[str]:
    """What raw prompts, without a template, lead to."""
    prompts = ["Once upon a time", "1, 2, 3, 4,", "7 + 5 =", "The weather today is"]
    return [f"{prompt!r} -> {folder.replies([prompt])[0].text!r}" for prompt in prompts]


def measure(skill: str, asked: list[Case], single: Folder, half: Folder) -> Line:
    """Answer every case twice: in float32 one row at a time, and in bfloat16 in padded batches of sixteen."""
    return Line(skill, asked, single.answers(asked, rows=1), half.answers(asked, rows=16))


def total(lines: list[Line]) -> Line:
    """All lines as one."""
    asked = [case for line in lines for case in line.asked]
    single = [reply for line in lines for reply in line.single]
    return Line("all", asked, single, [reply for line in lines for reply in line.half])


def evaluate(path: Path, samples: int = SAMPLES) -> str:
    """The mistakes, the accuracy table in Markdown, and what raw prompts lead to."""
    single, half = Folder(path, torch.float32), Folder(path, torch.bfloat16)
    groups = cases(samples) | {"long conversations": long_cases(samples)} | tool_cases(samples)
    lines = [measure(skill, asked, single, half) for skill, asked in groups.items()]
    mistakes = [text for line in lines for text in line.mistakes()]
    return "\n".join([*mistakes, "", HEADER, *(line.text() for line in [*lines, total(lines)]), "", *raw_check(half)])
