"""Asks the routers for a short answer over REST. Without a key of its own it only sees that the door is closed."""

import json
import os
import urllib.error
import urllib.request

NO_REDIS = (
    "The routers answer, but cannot reach Redis: what they run does not survive them. Where its pod is Pending, see "
    "redis.persistence.storageClass and redis.nodeSelector; where Redis is yours, redis.external."
)
key = os.environ.get("API_KEY", "").split(",")[0]
body = {"model": os.environ["MODEL"], "prompt": "Once upon a time", "max_tokens": 4}
headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
request = urllib.request.Request(f"http://{os.environ['ADDRESS']}/v1/completions", json.dumps(body).encode(), headers)
try:
    with urllib.request.urlopen(request, timeout=float(os.environ["SECONDS_TO_WAIT"])) as answer:
        tokens = json.load(answer)["usage"]["completion_tokens"]
except urllib.error.HTTPError as error:
    if key or os.environ["AUTH_MODE"] == "none" or error.code != 401:
        hint = os.environ["HINT"] if error.code >= 500 else ""
        raise SystemExit(f"HTTP {error.code}: {error.read().decode()}\n{hint}") from error
    print("The routers answer, and let nobody in without a key.")
except OSError as error:
    raise SystemExit(f"No router answers: {error}\n{os.environ['HINT']}") from error
else:
    assert tokens > 0, "the answer is empty"
    if answer.headers.get("x-quire-journal") == "unavailable":
        raise SystemExit(NO_REDIS)
    print(f"{body['model']} answered over REST with {tokens} tokens.")
