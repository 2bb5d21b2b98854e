"""instructor over the openai package: ``instructor_client.py URL``. Each of its modes that asks for a schema."""

import sys
from collections.abc import Callable
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict
from scenarios import FIRST, PARAMETERS, run


class Sum(BaseModel):
    """The answer in a form of its own."""

    model_config = ConfigDict(extra="forbid")  # else the demo model goes on with keys of its own

    total: Literal[12, 7]


def scenarios(url: str) -> dict[str, Callable[[], object]]:
    asked = {"model": "tools", "messages": FIRST, "response_model": Sum, "max_retries": 0, **PARAMETERS}

    def client(mode: instructor.Mode) -> instructor.Instructor:
        return instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)

    def tools() -> object:
        return {"total": client(instructor.Mode.TOOLS).create(**asked).total}

    def json_schema() -> object:
        return {"total": client(instructor.Mode.JSON_SCHEMA).create(**asked).total}

    def partial() -> object:
        *_, last = client(instructor.Mode.JSON_SCHEMA).create_partial(**asked)
        return {"total": last.total}

    return {act.__name__: act for act in (tools, json_schema, partial)}


if __name__ == "__main__":
    run({"instructor": scenarios(sys.argv[1])})
