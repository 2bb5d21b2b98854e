"""The messages of one stream, each with the mark of where its reader then stands. Does no I/O."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from google.protobuf.message import Message

from quire_router.api.answer import Response
from quire_router.api.reading import create_parsers
from quire_router.api.rpc.said import write_said
from quire_router.generation import Delta, GenerationRequest

Respond: TypeAlias = Callable[[GenerationRequest, Delta, str], Message]
"""Writes the message of a piece, with the id of its event."""


class DeltaMessages:
    """Makes messages of the answer's pieces. ``respond`` writes one."""

    def __init__(self, answer: Response, respond: Respond) -> None:
        self._generation = answer.prepared.first
        self._mark = answer.cursor
        self._respond = respond
        self._readers = create_parsers(answer.prepared)

    def piece(self, delta: Delta) -> Message | None:
        """The message of a piece; None where it says nothing that the reader has not had."""
        said = None if self._readers is None else self._readers[delta.index].parse(delta)
        if delta.usage is not None and self._mark.usage:
            delta = replace(delta, usage=None)
        if delta.replayed:
            delta, said = Delta("", [], usage=delta.usage, index=delta.index), None
        if not _says_anything(delta):
            return None
        self._mark.advance(delta)
        self._mark.usage |= delta.usage is not None
        if said is None:
            return self._respond(self._generation, delta, str(self._mark))
        message = self._respond(self._generation, replace(delta, text=said.content), str(self._mark))
        write_said(message, said)
        return message


def _says_anything(delta: Delta) -> bool:
    """Whether a piece adds something: that with the usage may be empty but for it, and its reader may have that."""
    return bool(delta.token_ids or delta.text or delta.finish_reason or delta.usage or delta.prompt_logprobs)
