"""SGLang's kits, which are classes of HTTP tests for any server, with a server of Quire."""

import importlib.machinery
import importlib.util
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import openai
import quire_servers

KITS = Path(os.environ["PYTHONPATH"].split(os.pathsep)[-1]) / "sglang" / "test" / "kits"


class _Helpers(types.ModuleType):
    """A module in which every name is a function that does nothing, and every import finds such a module."""

    __path__: list[str] = []  # noqa: RUF012 - it is how a package is told

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _Finder:
    """Finds helpers for all of SGLang but its kits."""

    @staticmethod
    def find_spec(name: str, *_: object) -> Any:
        """Returns what loads a module, None for other projects' and for kits."""
        if name.partition(".")[0] != "sglang" or name.startswith("sglang.test.kits"):
            return None
        return importlib.machinery.ModuleSpec(name, _Finder, is_package=True)

    @staticmethod
    def create_module(spec: Any) -> types.ModuleType:
        """Returns the module."""
        return _Helpers(spec.name)

    @staticmethod
    def exec_module(_: types.ModuleType) -> None:
        """Has nothing to run."""


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
SERVERS = quire_servers.Servers()
MODEL = "served-model"


class _Served:
    """What kits expect of the class that they are mixed into."""

    model = served_model_name = MODEL
    api_key = "none"

    @classmethod
    def setUpClass(cls) -> None:
        """Starts the server."""
        os.environ.setdefault("OPENAI_API_KEY", "none")
        template = quire_servers.thinking_template() if "SeparateReasoning" in cls.__name__ else None
        cls.base_url = f"http://127.0.0.1:{SERVERS.get(MODEL, [], template).port}"
        cls.client = openai.OpenAI(base_url=f"{cls.base_url}/v1", api_key="none")
        getattr(super(), "setUpClass", lambda: None)()


def _kits() -> dict[str, Any]:
    found = {}
    for path in sorted(KITS.glob("*_kit.py")):
        spec = importlib.util.spec_from_file_location(f"kits.{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # noqa: BLE001 - of whatever library
            print(f"{path.stem} cannot be imported: {error!r}")
            continue
        for name, kit in vars(module).items():
            has_tests = isinstance(kit, type) and any(each.startswith("test") for each in dir(kit))
            if has_tests and kit.__module__ == spec.name and not issubclass(kit, unittest.TestCase):
                found[f"Test{name}"] = type(f"Test{name}", (_Served, kit, unittest.TestCase), {})
    return found


globals().update(_kits())
