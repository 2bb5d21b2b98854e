"""Gets an answer as JSON of a schema, here of a pydantic model: ``python examples/structured_output.py``.

Ask ``quire serve demo/model --served-model-name quire-demo``, or set OPENAI_BASE_URL and MODEL.
"""

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Animal(BaseModel):
    """The form of the answer. The router compiles it into a grammar, so every answer has it."""

    kind: Literal["fox", "owl", "bear"]
    age: int = Field(ge=0, le=30)


client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
answer = client.chat.completions.parse(
    model=os.environ.get("MODEL", "quire-demo"),
    messages=[{"role": "user", "content": "Which animal lives in the forest?"}],
    response_format=Animal,
    max_tokens=64,
)
print(answer.choices[0].message.parsed)
