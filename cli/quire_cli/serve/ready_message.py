"""What ``quire serve`` prints once it serves: what that is, and commands to try it."""

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from quire_engine.checkpoint.config import read_config_json
from quire_engine.checkpoint.pooler_config import read_pooler_config
from quire_engine.errors import ModelError
from quire_proto.cli import join_host_port
from quire_proto.pooling import Task
from quire_proto.text.file_names import CONFIG, PROCESSOR_TEMPLATE, TEMPLATE, TEMPLATE_FOLDER

from quire_cli.machine.server import DEFAULT_URL, SERVER_KEYS
from quire_cli.serve.plan import Plan, reachable

_LABEL = 8  # characters


def summary(plan: Plan, facts: Mapping[str, object]) -> list[str]:
    """Returns a line for each of the facts that people look for; ``facts`` are an engine's, empty if it gave none."""
    url, several = url_of(plan), f" for each of {plan.engines} engines" if plan.engines > 1 else ""
    lines = {"model": plan.name if str(plan.model) == plan.name else f"{plan.name} ({plan.model})"}
    if facts:
        lines["dtype"] = f"{facts.get('dtype')} on {facts.get('device')}"
        lines["context"] = f"{facts.get('max_model_len', 0):,} tokens"
        lines["KV"] = f"{facts.get('kv_tokens', 0):,} tokens{several}"
    lines["API"] = f"{url}/v1"
    if plan.settings.page:
        lines["page"] = f"{url} in a browser"
    lines["metrics"] = f"http://{join_host_port(reachable(plan.settings.host), plan.settings.metrics_port)}/metrics"
    return [f"{label:{_LABEL}} {text}" for label, text in lines.items()]


def how_to_try(plan: Plan) -> str:
    """Commands that ask for an answer, of the kind that the model gives."""
    url = url_of(plan)
    body: dict[str, object] = {"model": plan.name}
    key, given = _key(plan)
    where = "" if url == DEFAULT_URL else f" --url {shlex.quote(url)}"
    where += given
    task, command = task_of(plan), ""
    if task is Task.EMBED:
        route = "v1/embeddings"
        body["input"] = ["What is 7 plus 5?", "Once upon a time"]
    elif task is Task.CLASSIFY:
        route = "score"
        body |= {"text_1": "What is 7 plus 5?", "text_2": ["7 plus 5 is 12.", "Once upon a time"]}
    elif has_template(plan.tokenizer):
        route, command = "v1/chat/completions", f"  quire chat{where}\n\n"
        body |= {"stream": True, "messages": [{"role": "user", "content": "What is 7 plus 5?"}]}
    else:
        route, command = "v1/completions", f"  quire complete{where} 'Once upon a time'\n\n"
        body |= {"stream": True, "prompt": "Once upon a time", "max_tokens": 64}
    return (
        f"ready: {plan.name} on {url} (gRPC on {plan.settings.grpc_port}); Ctrl-C stops it. Try\n\n"
        f"{command}"
        f"  curl -N {shlex.quote(f'{url}/{route}')} \\\n"
        f"    -H 'Content-Type: application/json' \\\n{key}"
        f"    -d '{json.dumps(body)}'\n"
    )


def task_of(plan: Plan) -> Task:
    """What the engines do with prompts, by their settings and the model's folder."""
    try:
        pooler = read_pooler_config(plan.model, read_config_json(plan.model), plan.engine)
    except (ModelError, OSError):  # it was there when the engines read it: what is printed is no reason to end them
        return Task.GENERATE
    return Task.GENERATE if pooler is None else pooler.task


def url_of(plan: Plan) -> str:
    """Where clients on this machine find the REST API."""
    return f"http://{join_host_port(reachable(plan.settings.host), plan.settings.http_port)}"


def has_template(folder: Path) -> bool:
    """Whether the model whose tokenizer is in ``folder`` can chat."""
    files = (folder / TEMPLATE, *(folder / TEMPLATE_FOLDER).glob("*.jinja"))
    if any(file.is_file() for file in files):
        return True
    for name in (CONFIG, PROCESSOR_TEMPLATE):
        with suppress(OSError, ValueError):
            if "chat_template" in json.loads((folder / name).read_text()):
                return True
    return False


def _key(plan: Plan) -> tuple[str, str]:
    """The line of curl and the flag of ``quire chat`` that send a key: a shell expression or a placeholder, so that the
    key itself is not printed. A key in the environment needs no flag.
    """
    if keys := os.environ.get(SERVER_KEYS):
        name, flag = f"${{{SERVER_KEYS}%%,*}}" if "," in keys else f"${SERVER_KEYS}", ""
    elif plan.settings.api_key:
        name, flag = "KEY", " --api-key KEY"
    else:
        return "", ""
    return f'    -H "Authorization: Bearer {name}" \\\n', flag
