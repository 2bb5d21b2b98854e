"""Cuts a stream in the middle and reads the rest over another connection: ``python examples/resume.py``.

The same works when a router dies: any other router continues the stream. docs/resuming.md explains the headers.
Ask ``quire serve demo/model --served-model-name quire-demo``, or set OPENAI_BASE_URL and MODEL.
"""

import json
import os
import uuid
from collections.abc import Iterator
from itertools import islice

import httpx

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("MODEL", "quire-demo")
HEADERS = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}
CUT_AFTER = 10


def events(response: httpx.Response) -> Iterator[tuple[str, str]]:
    """Yields the id and the data of each event."""
    event_id = ""
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data" and value != "[DONE]":
            yield event_id, value


with httpx.Client(base_url=URL, headers=HEADERS, timeout=60) as http:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 100, "stream": True}
    with http.stream("POST", "/completions", json=body, headers={"Idempotency-Key": uuid.uuid4().hex}) as response:
        for event_id, data in islice(events(response), CUT_AFTER):
            chunk, cursor = json.loads(data), {"Last-Event-ID": event_id}
            print(chunk["choices"][0]["text"], end="", flush=True)
    print(" [the connection is cut here] ", end="")
    with http.stream("GET", f"/requests/{chunk['id']}/events", headers=cursor) as response:
        for _, data in events(response):
            print("".join(choice["text"] for choice in json.loads(data)["choices"]), end="", flush=True)
    print()
