"""Runs a file of requests when there is room, and prints the answers: ``python examples/batch.py``.

Ask ``quire serve demo/model --served-model-name quire-demo``, or set OPENAI_BASE_URL and MODEL.
"""

import json
import os
import time

from openai import OpenAI

MODEL = os.environ.get("MODEL", "quire-demo")
client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
lines = [
    {
        "custom_id": f"sum-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": [{"role": "user", "content": f"What is {number} plus 5?"}]},
    }
    for number in range(3)
]
content = "\n".join(map(json.dumps, lines)).encode()
file = client.files.create(file=("sums.jsonl", content), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.5)
    batch = client.batches.retrieve(batch.id)
if batch.output_file_id is None:
    raise SystemExit(f"the batch {batch.status}: {batch.errors}")
for line in client.files.content(batch.output_file_id).text.splitlines():
    result = json.loads(line)
    print(result["custom_id"], result["response"]["body"]["choices"][0]["message"]["content"])
