"""Other servers' suites against Quire: what their tests start, what their cases come to, and which names they list."""

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

from scripts.peer_parameters import PEERS, Peer, cpp_names, listed
from scripts.peer_parameters import Classes as ParsedClasses
from tests.peers import run
from tests.peers.checkpoints import flags_in
from tests.peers.classes import EXCUSES, Classes, Outcome, cases_of
from tests.peers.run import settled, table
from tests.peers.shims.quire_servers import Servers, checkpoint_kind, options, serve_arguments, served_names

ROOT = Path(__file__).parents[3]
KNOWN = frozenset({"--max-model-len", "--enable-lora", "--lora-modules", "--dtype", "--port"})
LINES = [
    {"id": f"a.py::test_{name}", "outcome": outcome, "error": error}
    for name, outcome, error in [
        *((name, "collected", "") for name in ("one", "two", "three", "four", "five", "six", "seven")),
        ("one", "passed", ""),
        ("two", "failed", "lora is not supported here: use model"),
        ("three", "skipped", "no GPU"),
        ("four", "failed", "KeyError"),
        ("five", "failed", "assert 1 == 2"),
        ("six", "passed", ""),
        ("six", "failed", "Error code: 500"),
    ]
]
"""What ``case_log`` writes: all cases, then what became of them."""
INTERNAL = {"class": "internal to the peer", "reason": "why", "errors": ["Error"]}
CLASSES = [
    {"class": "needs a real model", "reason": "why", "cases": ["a.py::test_f"], "errors": ["assert"]},
    {
        "class": "internal to the peer",
        "reason": "why",
        "cases": ["a.py::test_four", "a.py::test_one"],
        "errors": ["Error"],
    },
    {"class": "internal to the peer", "reason": "why", "cases": ["a.py::test_six"], "errors": ["Error"]},
]
PROTOCOL = """
class Base(BaseModel):
    n: int = 1
    schema_: dict | None = Field(None, alias="schema")
    kinds: ClassVar[int] = 3

class Request(Base, _Reserved):
    stop: list[str]
    _private: int = 0

_Reserved = TypedDict("_Reserved", {"async": bool}, total=False)

class Client:
    def rerank(self, *, model: str, top_n: int, request_options: object = None): ...
"""
SERVER = """
add((new field_num("n_predict", p))->add_alias("max_tokens"));
add((new field_nested("stream_options"))->add_subfield((new field_bool("include_usage", p))));
auto lora = json_value(body, "lora", json()); if (body.contains("stop")) body.at("stop"); json_value(other, "no", 1);
"""


def test_a_model_is_stood_in_for_by_one_of_its_kind():
    kinds = {name: checkpoint_kind(name) for name in ("Qwen/Qwen3-0.6B", "intfloat/e5-small", "BAAI/bge-reranker-base")}

    assert [*kinds.values()] == ["chat", "embed", "rerank"]


def test_flags_that_both_servers_have_are_kept_and_those_of_the_hardware_are_not():
    given = ["--dtype", "bfloat16", "--enable-lora", "--lora-modules", "a=/x", "b=/y", "--enforce-eager", "--port=8000"]

    assert options(given)[2:4] == [("--lora-modules", ["a=/x", "b=/y"]), ("--enforce-eager", [])]
    assert serve_arguments(given, KNOWN, 512) == [
        *("--enable-lora", "--lora-modules", "a=/x", "b=/y"),
        *("--max-model-len", "512"),
    ]


def test_a_server_has_the_names_that_a_test_gives_its_model():
    assert served_names("m", ["--served-model-name", "a", "b", "--port", "1"]) == ["a", "b"]
    assert served_names("m", []) == ["m"]


def test_contexts_that_no_test_fills_are_one_and_none_is_longer_than_the_checkpoints():
    lengths = {
        each: serve_arguments(["--max-model-len", each], KNOWN, 9000) for each in ("512", "4096", "auto", "10100")
    }
    lengths |= {"short": serve_arguments(["--max_model_len", "512"], KNOWN, 100), "": serve_arguments([], KNOWN, 9000)}

    assert {name: length[-1] for name, length in lengths.items()} == {
        **{"512": "512", "4096": "8192", "auto": "8192", "10100": "9000"},
        **{"short": "100", "": "8192"},
    }


def test_a_server_that_lacks_a_name_ends_before_another_takes_its_place(tmp_path, monkeypatch):
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "config.json").write_text("{}")
    (tmp_path / "flags.txt").write_text("")
    monkeypatch.setenv("QUIRE_CHECKPOINTS", str(tmp_path))
    monkeypatch.setenv("QUIRE_COMMAND", "sh -c 'echo ready: now; exec sleep 60'")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    servers = Servers(["b"])
    try:
        first, again, other = (servers.get(name, []) for name in "aba")
        third = servers.get("c", [])
        assert first is again is other
        assert (first.process.poll() is None, third.process.poll() is None) == (False, True)
    finally:
        servers.stop()


def test_flags_are_read_from_a_help_text():
    assert flags_in("options:\n  -h, --help  show\n  --port PORT, --http-port PORT\n  --engines N  see --port\n") == [
        "--engines",
        "--port",
    ]


def outcomes(lines: list[dict[str, str]], classes: Classes) -> dict[str, Outcome]:
    return {case.id[-4:]: classes.outcome(case) for case in cases_of(map(json.dumps, lines))}


def test_each_case_has_one_outcome():
    found = outcomes(LINES, Classes(CLASSES))

    assert list(found.values()) == [
        *(Outcome.PASS, Outcome.REFUSED, Outcome.SKIPPED, Outcome.INTERNAL, Outcome.REAL_MODEL, Outcome.FAULT),
        Outcome.NOT_REACHED,
    ]
    assert table({"x": Counter(found.values())}).splitlines()[2] == "| x | 7 | 1 | 1 | 1 | 1 | 1 | 0 | 1 | 1 |"


def test_a_case_that_passes_without_a_server_is_none_of_ours():
    assert outcomes([{"id": "a.py::test_five", "outcome": "unserved", "error": ""}], Classes([])) == {
        "five": Outcome.INTERNAL
    }


def test_a_class_explains_only_the_errors_that_it_names():
    failed = [{"id": "a.py::test_five", "outcome": "failed", "error": "KeyError"}]

    assert outcomes(failed, Classes(CLASSES)) == {"five": Outcome.FAULT}


@pytest.mark.parametrize("error", ["quire serve did not start: why", "Timeout (>300.0s) from pytest-timeout."])
def test_no_class_excuses_an_error_of_the_server(error):
    failed = [{"id": "a.py::test_four", "outcome": "failed", "error": f"RuntimeError: {error}"}]

    assert outcomes(failed, Classes(CLASSES)) == {"four": Outcome.FAULT}


def test_an_unused_class_is_reported():
    classes = Classes(CLASSES)
    outcomes(LINES, classes)

    assert classes.unused() == ["a.py::test_one", "a.py::test_six"]


def test_what_was_a_fault_or_was_not_reached_runs_again():
    kept = {json.loads(line)["id"] for line in settled(map(json.dumps, LINES), Classes(CLASSES))}

    assert kept == {f"a.py::test_{name}" for name in ("one", "two", "three", "four", "five")}


def test_every_class_has_a_reason_and_a_known_peer():
    known = json.loads((ROOT / "tests/peers/classes.json").read_text(encoding="utf-8"))

    assert set(known) <= set(run.SUITES)
    for classes in known.values():
        assert {Outcome(each["class"]) for each in classes} <= {*EXCUSES}
        assert all(each["reason"] and each["cases"] and each["errors"] for each in classes)
        prefixes = [prefix for each in classes for prefix in each["cases"]]
        assert len(prefixes) == len(set(prefixes))


def test_names_are_read_from_classes_their_bases_and_methods(tmp_path):
    path = tmp_path / "protocol.py"
    path.write_text(PROTOCOL)
    classes = ParsedClasses([path])

    assert classes.names("Request") == {"n", "schema", "stop", "async"}
    assert {"model", "top_n"} <= classes.names("protocol:Client.rerank")
    peer = Peer("x", ("*.py",), {"chat": ["Request"], "rerank": ["Client.rerank"]})
    assert listed(peer, tmp_path)["rerank"] == ["model", "top_n"]


def test_names_are_read_from_a_server_in_cpp():
    assert cpp_names(SERVER, "") == {"n_predict", "max_tokens", "stream_options"}
    assert cpp_names(SERVER, "body") == {"lora", "stop"}


def test_every_listed_peer_is_fetched():
    script = (ROOT / "scripts/peer_suites.sh").read_text(encoding="utf-8")

    assert all(peer.distribution in script for peer in PEERS.values())


def test_shims_import_nothing_of_quire():
    """Their environments belong to other servers."""
    for path in (ROOT / "tests/peers/shims").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [
                name for name in names if name.startswith(("quire_proto", "quire_cli", "quire_router", "tests"))
            ]
