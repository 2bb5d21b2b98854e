"""Streams an answer of a chat model: ``python examples/chat.py "What is 7 plus 5?"``.

Ask ``quire serve demo/model --served-model-name quire-demo``, or set OPENAI_BASE_URL and MODEL.
"""

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
question = " ".join(sys.argv[1:]) or "Tell me a story about a fox."
for chunk in client.chat.completions.create(
    model=os.environ.get("MODEL", "quire-demo"), messages=[{"role": "user", "content": question}], stream=True
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
