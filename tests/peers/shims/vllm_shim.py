"""A pytest plugin for vLLM's tests: their ``RemoteOpenAIServer`` is a server of Quire. It replaces ``tests.utils``,
whose own imports need vLLM's compiled parts.
"""

import asyncio
import functools
import importlib.machinery
import inspect
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import anthropic
import huggingface_hub
import openai
import pytest
import quire_servers
import requests
import transformers

_NAMED = re.compile(r'''^MODEL\w*\s*=\s*"([^"]+)"''', re.MULTILINE)


def models_named() -> list[str]:
    """Returns the models that the tests start."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(Path("tests/entrypoints").rglob("test_*.py")))
    return [name for text in texts if "Remote" in text for name in _NAMED.findall(text)]


SERVERS = quire_servers.Servers(models_named())


class RemoteOpenAIServer:
    """What vLLM's tests call a server, with the methods that they use."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self, model: str, vllm_serve_args: list[str], *, env_dict: dict[str, str] | None = None, **_: object
    ) -> None:
        arguments = [_adapter(str(each)) for each in vllm_serve_args]
        keys = (place for place, name in enumerate(arguments, 1) if name == "--api-key")
        for place in [*keys]:
            arguments[place] = _long_key(arguments[place])
        if "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in (env_dict or {}):
            arguments.append("--allow-lora-updates")
        thinks = "--reasoning-parser" in arguments and "--tool-call-parser" not in arguments
        self.host = "127.0.0.1"
        self.port = SERVERS.get(model, arguments, quire_servers.thinking_template() if thinks else None).port

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_: object) -> None:
        """The server is kept for the next module that wants the same."""

    @property
    def url_root(self) -> str:
        """The address, without a path."""
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        """Returns the address of a path."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        """Returns OpenAI's client of it."""
        return openai.OpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Returns OpenAI's asynchronous client of it."""
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        """Returns Anthropic's client of it."""
        return anthropic.Anthropic(base_url=self.url_root, **self._options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """Returns Anthropic's asynchronous client of it."""
        return anthropic.AsyncAnthropic(base_url=self.url_root, **self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 100, **options}


def _long_key(key: str) -> str:
    """Returns a key as long as Quire's have to be."""
    return key.ljust(16, "-")


_request = requests.Session.request


def _with_long_key(
    session: requests.Session, method: str, url: str, *, headers: Any = None, **options: Any
) -> requests.Response:
    given = dict(headers or {})
    if "Authorization" in given:
        given["Authorization"] = f"Bearer {_long_key(given['Authorization'].removeprefix('Bearer '))}"
    return _request(session, method, url, headers=given, **options)


requests.Session.request = _with_long_key


def _adapter(argument: str) -> str:
    """Returns a value of ``--lora-modules`` as NAME=FOLDER, with the adapter that stands for those on the Hub."""
    if argument.startswith('{"name"'):
        module = json.loads(argument)
        return f"{module['name']}={module['path']}"
    name, equals, place = argument.partition("=")
    return f"{name}={SERVERS.adapter}" if equals and place == name else argument


def _unneeded(name: str) -> Any:
    """Returns what stands for other names of ``tests.utils``: marks and decorators, which do nothing here."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name.isupper():
        return []
    return lambda function=None, *_, **__: function if callable(function) else (lambda inner: inner)


utils = types.ModuleType("tests.utils")
utils.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
utils.__getattr__ = _unneeded  # type: ignore[method-assign]
sys.modules["tests.utils"] = utils
tools = types.ModuleType("gpt_oss")  # vLLM's server runs its tools; tests only look whether it is installed
tools.__spec__ = importlib.machinery.ModuleSpec("gpt_oss", None)
sys.modules["gpt_oss"] = tools


def _fetched(_: object, repo_id: str, **__: object) -> str:
    """Returns the folder that stands for one of the Hub: what tests fetch are adapters, or a model by its name."""
    is_adapter = any(word in repo_id.lower() for word in ("lora", "alice"))
    return str(SERVERS.adapter) if is_adapter else repo_id


huggingface_hub.HfApi.snapshot_download = _fetched
_from_pretrained = transformers.AutoTokenizer.from_pretrained


def _tokenizer(name: str, *arguments: Any, **options: Any) -> Any:
    return _from_pretrained(str(SERVERS.folder(str(name))), *arguments, **{**options, "trust_remote_code": False})


transformers.AutoTokenizer.from_pretrained = _tokenizer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sets the outcome of cases that start no server: they are about vLLM's own code, so they need not run."""
    for item in items:
        fixtures = [each.func for found in item._fixtureinfo.name2fixturedefs.values() for each in found]
        if not any(starts_server(function, set()) for function in (item.obj, *fixtures)):
            item.user_properties.append(("outcome", "unserved"))
        elif inspect.iscoroutinefunction(item.obj):
            item.obj = _ending_tasks(item.obj)


def starts_server(function: Any, seen: set[object]) -> bool:
    """Returns whether a test or a fixture starts a server, itself or by other functions of its module."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return False
    seen.add(code)
    names = _names(code)
    found = getattr(function, "__globals__", {})
    return any(name.startswith("Remote") for name in names) or any(
        starts_server(found[name], seen) for name in names if callable(found.get(name))
    )


def _ending_tasks(function: Any) -> Any:
    """Returns a test that ends the tasks it leaves when it fails, which would send requests beside the next test's."""

    @functools.wraps(function)
    async def test(*arguments: Any, **options: Any) -> None:
        before = asyncio.all_tasks()
        try:
            await function(*arguments, **options)
        finally:
            for task in asyncio.all_tasks() - before:
                task.cancel()

    return test


def _names(code: types.CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return {*code.co_names}.union(*map(_names, inner))
