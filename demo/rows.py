"""Batches of packed rows: documents become tokens and targets, and fill rows of one length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import NamedTuple

import calls
import torch
from corpus import Document, documents
from tokenizer import TEXT_END, segments
from tokenizers import Tokenizer
from torch import Tensor

IGNORED = -100


class Batch(NamedTuple):
    """Int64 tensors `[rows, length]`: tokens, the document each belongs to, and what must follow.

    `documents` is None where every row is one document.
    """

    tokens: Tensor
    documents: Tensor | None
    targets: Tensor

    def parts(self, rows: int) -> list[Batch]:
        """The same batch in pieces of so many rows."""
        count = -(-len(self.tokens) // rows)
        documents = [None] * count if self.documents is None else self.documents.split(rows)
        return [Batch(*part) for part in zip(self.tokens.split(rows), documents, self.targets.split(rows), strict=True)]


class Encoded(NamedTuple):
    """The tokens of one document, and for each whether it is to be learned."""

    tokens: list[int]
    learned: list[bool]


@dataclass(frozen=True, slots=True)
class Diet:
    """What one kind of batch is made of: row length in tokens, exchanges a conversation, share of plain text, and
    whether conversations have functions to call.
    """

    length: int
    turns: tuple[int, int]
    plain_share: float
    packed: bool = True
    tools: bool = False

    def documents(self, seed: int) -> Iterator[Document]:
        """The endless stream of its documents."""
        return calls.documents(seed, self.turns) if self.tools else documents(seed, self.turns, self.plain_share)


SHORT = Diet(length=256, turns=(1, 5), plain_share=0.1)
MIDDLE = Diet(length=512, turns=(1, 16), plain_share=0.1)
LONG = Diet(length=2048, turns=(100, 100), plain_share=0.0, packed=False)
TOOLS = Diet(length=512, turns=(1, 5), plain_share=0.0, tools=True)


def encode(tokenizer: Tokenizer, document: Document, start: bool) -> Encoded:
    """Tokens of the document, after the text mark if `start`."""
    tokens: list[int] = tokenizer.encode(TEXT_END).ids if start else []
    learned = [False] * len(tokens)
    for text, answer in segments(document):
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        tokens += piece
        learned += [answer] * len(piece)
    return Encoded(tokens, learned)


def encoded(tokenizer: Tokenizer, diet: Diet, seed: int) -> Iterator[Encoded]:
    """Documents that fit into a row, or are cut to fit where rows are not packed.

    Every other plain text, and one conversation in ten, begins with the text mark, so that a server may send it or not.
    """
    rng = Random(seed)
    for document in diet.documents(seed):
        item = encode(tokenizer, document, rng.random() < (0.1 if document.messages else 0.5))
        if not diet.packed:
            yield Encoded(item.tokens[: diet.length], item.learned[: diet.length])
        elif len(item.tokens) <= diet.length:
            yield item


def fill(pool: list[Encoded], length: int) -> list[Encoded]:
    """Take from the pool, oldest first, what fits into one row."""
    chosen, room = [], length
    for item in list(pool):
        if len(item.tokens) <= room:
            chosen.append(item)
            pool.remove(item)
            room -= len(item.tokens)
        if room < 24:
            break
    return chosen


def row(items: list[Encoded], length: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens, document numbers and targets of one row; padding is a document of its own."""
    tokens: list[int] = []
    numbers: list[int] = []
    targets: list[int] = []
    for number, item in enumerate(items):
        tokens += item.tokens
        numbers += [number] * len(item.tokens)
        following = zip(item.tokens[1:], item.learned[1:], strict=True)
        targets += [token if learned else IGNORED for token, learned in following] + [IGNORED]
    padding = length - len(tokens)
    return tokens + [0] * padding, numbers + [-1] * padding, targets + [IGNORED] * padding


def batches(tokenizer: Tokenizer, diet: Diet, tokens_per_batch: int, seed: int) -> Iterator[Batch]:
    """An endless stream of batches of `tokens_per_batch / length` rows each."""
    source = encoded(tokenizer, diet, seed)
    pool: list[Encoded] = []
    while True:
        rows = []
        for _ in range(tokens_per_batch // diet.length):
            pool += islice(source, max(0, (48 if diet.packed else 1) - len(pool)))
            rows.append(row(fill(pool, diet.length), diet.length))
        tokens, numbers, targets = (torch.tensor(column) for column in zip(*rows, strict=True))
        yield Batch(tokens, numbers if diet.packed else None, targets)
