"""Requests of other APIs that are run as chats. ``TranslatedRequest`` is the chat that was made from one,
``FieldNames`` makes its errors name the fields that the client sent, and ``fields_of_chats`` are those of a chat that
another API does not have.
"""

import re
from collections.abc import Mapping
from typing import ClassVar, Final, Self

from pydantic import PrivateAttr
from quire_proto.errors import QuireError

from quire_router.api.schemas.base import StrictModel
from quire_router.api.schemas.openai import ChatRequest
from quire_router.api.schemas.parameters import Parameter, Table

FIELDS_OF_EXECUTION: Final = ("min_tokens", "stop_token_ids", "ignore_eos", "background", "priority", "store")
"""Fields by which a chat is run, which other APIs take under the same names."""

_INSTEAD = "it is a field of /v1/chat/completions"
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "n": (1,), "best_of": (1,), "use_beam_search": (False,), "beam_width": (0, 1), "length_penalty": (1,),
    "early_stopping": (False,), "include_stop_str_in_output": (False,), "logprobs": (False,), "top_logprobs": (0,),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,), "skip_special_tokens": (True,),
    "separate_reasoning": (True,), "include_reasoning": (True,),
}  # fmt: skip


def fields_of_chats(known: Table) -> Table:
    """Returns every field of a chat as one that another API does not have, and every other name of one; but for those
    that the API's own table has, which means them otherwise.
    """
    own = {name: Parameter(_NEUTRAL.get(name, ()), _INSTEAD) for name in ChatRequest.model_fields}
    others = {
        name: Parameter(each.neutral, (known.get(each.same_as) or own[each.same_as]).instead)
        for name, each in ChatRequest.foreign.items()
        if each.same_as
    }
    return {**own, **others}


_TOOL_FIELD = re.compile(r"(tools\[\d+\])\.function\.(name|description|parameters|strict)")


class FieldNames:
    """What fields of a chat are called in another API: ``names`` by their names in the chat, and ``tool_fields`` by
    those of a tool's function, where they are others. ``pattern`` finds the names in a sentence.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        *,
        pattern: re.Pattern[str] | None = None,
        tool_fields: Mapping[str, str] = {},
    ) -> None:
        self.names = names
        self._pattern = pattern or re.compile("|".join(map(re.escape, names)))
        self._tool_fields = tool_fields

    def translate_error(self, error: QuireError) -> QuireError:
        """Returns an error about a chat as one about the request that it was made from. A field of chats that a client
        wrote into its request, and that was refused for it, keeps its name.
        """
        if error.message.startswith(f"{error.param} is not supported here"):
            return error
        return error.about(error.param and self._translate(error.param), self._translate(error.message))

    def _translate(self, text: str) -> str:
        text = self._pattern.sub(lambda found: self.names[found[0].partition("[")[0]], text)
        return _TOOL_FIELD.sub(lambda found: f"{found[1]}.{self._tool_fields.get(found[2], found[2])}", text)


class TranslatedRequest(StrictModel):
    """A request that was made from one of another API, whose fields have these ``names``."""

    names: ClassVar[Mapping[str, str]] = {}
    _source: StrictModel | None = PrivateAttr(None)

    @property
    def as_sent(self) -> StrictModel:
        """See ``StrictModel``."""
        return self._source or self

    def made_from(self, source: StrictModel) -> Self:
        """Returns this request, which was made from ``source``."""
        self._source = source
        return self
