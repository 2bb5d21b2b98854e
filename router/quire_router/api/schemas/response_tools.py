"""The tools of a request of OpenAI's Responses API: functions that the client runs, also in namespaces, and which of
them may or must be called.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from quire_router.api.schemas.base import Parsed, StrictModel
from quire_router.api.schemas.conversation import MAX_DESCRIPTION_CHARACTERS, MAX_TOOLS, Function, Name, Tool
from quire_router.api.schemas.parameters import RESPONSES_TOOL, Table
from quire_router.api.schemas.response_items import name_in_template

_WEB_SEARCH = re.compile(r"web_search(?:_preview)?(?:_\d{4}_\d{2}_\d{2})?", re.ASCII)
_RUN_BY_CLIENTS = ("apply_patch", "custom", "local_shell", "shell")


def _tool_type(kind: str) -> str:
    if kind in ("function", "namespace") or _WEB_SEARCH.fullmatch(kind):
        return kind
    if kind in _RUN_BY_CLIENTS:
        raise ValueError(f"tools of type {kind!r} are not supported: describe it as a function")
    raise ValueError(
        f"tools of type {kind[:32]!r} are not supported: no tool runs on this server; describe it as a function, "
        "and run it where the client is"
    )


class FunctionTool(StrictModel):
    """A function that the client runs; ``parameters`` is a JSON Schema of an object. Or a ``namespace`` of some.
    Templates have none, so that its name stands before those of its ``tools`` there. Or a search of the web, which
    agents offer without being asked to: it is ignored.
    """

    foreign: ClassVar[Table] = RESPONSES_TOOL

    type: Annotated[str, AfterValidator(_tool_type)]
    name: Name | None = None
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARACTERS)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: Annotated[list["FunctionTool"], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.is_ignored:
            return self
        if self.name is None:
            raise ValueError(f"a tool of type {self.type} has the field name, which is missing")
        if (self.type == "namespace") != (self.tools is not None):
            raise ValueError("tools and the type namespace go together")
        for tool in self.tools or ():
            if tool.type != "function":
                raise ValueError("a namespace holds functions alone")
            name_in_template(self.name, tool.name or "")
        return self

    @property
    def is_ignored(self) -> bool:
        """See ``StrictModel``."""
        return self.type not in ("function", "namespace")

    def functions(self) -> Iterator[tuple[str | None, "FunctionTool"]]:
        """Yields the functions in it, with the namespace of each: itself, where it is one."""
        for tool in self.tools or ():
            yield self.name, tool
        if self.type == "function":
            yield None, self

    def to_chat(self) -> Iterator[Tool]:
        """Yields the tools of a chat."""
        for namespace, tool in self.functions():
            name = name_in_template(namespace, tool.name or "")
            function = Function(name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
            yield Tool(type="function", function=function)

    def repeated(self) -> dict[str, Any]:
        """Returns it as a response repeats it."""
        known = {"type": self.type, "name": self.name, "description": self.description}
        if self.tools is not None:
            return {**known, "tools": [tool.repeated() for tool in self.tools]}
        return {**known, "parameters": self.parameters, "strict": self.strict}


class NamedFunction(StrictModel):
    """One function among the tools, of a ``namespace`` if it is in one; without it of any."""

    type: Literal["function"]
    name: Name
    namespace: Name | None = None

    def matches(self, namespace: str | None, name: str) -> bool:
        """Whether it is the function of this name in a namespace."""
        if self.namespace is not None and self.namespace != namespace:
            return False
        return self.name in (name, name_in_template(namespace, name))


class NamedNamespace(StrictModel):
    """All functions of a namespace."""

    type: Literal["namespace"]
    name: Name

    def matches(self, namespace: str | None, _name: str) -> bool:
        """Whether a function is in it."""
        return namespace == self.name


class AllowedTools(StrictModel):
    """Those of the tools that may be called now. All stay in the prompt, which so remains the same."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction | NamedNamespace], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


ChoiceOfTools = Annotated[
    Literal["none", "auto", "required"] | NamedFunction | AllowedTools,
    Parsed(
        Literal["none", "auto", "required"] | NamedFunction | AllowedTools,
        'it must be "none", "auto", "required", {"type": "function", "name": ...} '
        'or {"type": "allowed_tools", "mode": ..., "tools": [...]}, of functions and namespaces',
    ),
]
