"""Other servers' suites against Quire: what their tests start, what their cases come to, and which names they list."""

import ast
import json
from collections import Counter
from pathlib import Path

from scripts.peer_parameters import PEERS, Classes, Peer, cpp_names, listed
from tests.peers import run
from tests.peers.checkpoints import flags_in
from tests.peers.run import Case, Outcome, cases_of, outcome, table
from tests.peers.shims.quire_servers import checkpoint_kind, options, serve_arguments

ROOT = Path(__file__).parents[3]
KNOWN = frozenset({"--max-model-len", "--enable-lora", "--lora-modules", "--dtype", "--port"})
REPORT = """<testsuites><testsuite>
<testcase classname="a.test_x" name="test_one"/>
<testcase classname="a.test_x" name="test_two"><failure message="lora is not supported here: use model">x</failure>
</testcase>
<testcase classname="a.test_x" name="test_three"><skipped message="no GPU"/></testcase>
<testcase classname="a.test_y" name="test_four"><error message="KeyError">trace</error></testcase>
<testcase classname="b.test_z" name="test_five"><failure message="assert 1 == 2">x</failure></testcase>
</testsuite></testsuites>"""
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
    assert serve_arguments("m", given, KNOWN, 512) == [
        *("--served-model-name", "m", "--enable-lora"),
        *("--lora-modules", "a=/x", "b=/y"),
    ]


def test_a_context_is_no_longer_than_the_checkpoints():
    assert serve_arguments("m", ["--max-model-len", "512"], KNOWN, 512)[2:] == ["--max-model-len", "512"]
    assert serve_arguments("m", ["--max-model-len", "513"], KNOWN, 512)[2:] == []
    assert serve_arguments("m", ["--served-model-name", "a", "b"], KNOWN, 512) == ["--served-model-name", "a,b"]


def test_flags_are_read_from_a_help_text():
    assert flags_in("options:\n  -h, --help  show\n  --port PORT, --http-port PORT\n  --engines N  see --port\n") == [
        "--engines",
        "--port",
    ]


def test_each_case_has_one_outcome():
    classes = {"a.test_y": ["needs a real model", "why"], "a.test_y::test_four": ["internal to the peer", "why"]}
    outcomes = [outcome(case, classes) for case in cases_of(REPORT)]

    assert outcomes == [Outcome.PASS, Outcome.REFUSED, Outcome.SKIPPED, Outcome.INTERNAL, Outcome.FAULT]
    assert table({"x": Counter(outcomes)}).splitlines()[2] == "| x | 5 | 1 | 1 | 0 | 1 | 1 | 0 | 1 |"


def test_a_case_that_fails_and_cannot_be_torn_down_counts_once():
    report = REPORT.replace('name="test_five"', 'name="test_four"').replace("b.test_z", "a.test_y")

    assert [case.id for case in cases_of(report)].count("a.test_y::test_four") == 1
    assert Case("a.test_y::test_four", "KeyError\ntrace") in cases_of(report)


def test_every_class_has_a_reason_and_a_known_peer():
    classes = json.loads((ROOT / "tests/peers/classes.json").read_text(encoding="utf-8"))

    assert set(classes) <= set(run.SUITES)
    for prefixes in classes.values():
        assert {Outcome(kind) for kind, _ in prefixes.values()} <= {*Outcome} - {Outcome.PASS, Outcome.FAULT}
        assert all(reason for _, reason in prefixes.values())


def test_names_are_read_from_classes_their_bases_and_methods(tmp_path):
    path = tmp_path / "protocol.py"
    path.write_text(PROTOCOL)
    classes = Classes([path])

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
