"""``quire serve``: one command, one tree of processes; what dies comes back, and nothing is left behind."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from openai import OpenAI
from quire.v1.engine_pb2 import DescribeRequest
from quire.v1.engine_pb2_grpc import EngineStub
from quire_cli.chat.api_client import ApiClient

from tests.service.conftest import DEMO, FLOAT32, SMALL_POOLS
from tests.support.gguf_files import pieces_metadata, with_metadata
from tests.support.hub_server import hub_server
from tests.support.ports import free_port
from tests.support.processes import Process, eventually, fetch, metric

NAME = "quire/demo"
GGUF = Path(__file__).parents[1] / "model" / "quantized" / "llama.gguf"
LONG = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 1200, "temperature": 1.2, "seed": 11}
STORY = {**LONG, "max_tokens": 600}
IGNORE_EOS = {"ignore_eos": True}


class Tree(Process):
    """A ``quire serve`` on free ports, if ``flags`` do not name them."""

    def __init__(
        self, log: Path, *flags: str, model: str | Path = DEMO, name: str | None = NAME, stdout: int | None = None
    ) -> None:
        command = [sys.executable, "-m", "quire_cli.main", "serve", str(model)]
        names = [] if name is None else ["--served-model-name", name]
        environment = {"XDG_STATE_HOME": str(log.parent / "state")}
        super().__init__([*command, *names, *SMALL_POOLS, *flags], log, environment, stdout=stdout)

    @property
    def url(self) -> str:
        return re.findall(r"ready: \S+ on (http://\S+)", self.text)[0]

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    @property
    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.popen.pid).children(recursive=True)

    def named(self, module: str) -> list[psutil.Process]:
        return [process for process in self.processes if module in process.cmdline()]

    def wait_ready(self) -> "Tree":
        eventually(lambda: "Ctrl-C stops it" in self.text or self.popen.poll() is not None, timeout=180)
        assert self.popen.poll() is None, self.text
        return self

    def end(self, number: int = signal.SIGINT) -> int:
        """Its status, after all of its processes have ended."""
        children = self.processes
        assert len(children) >= 2
        self.signal(number)
        status = self.wait(30)
        assert number == signal.SIGKILL or not self.text or "stopping; running requests have 2 s" in self.text
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, f"left behind: {alive}"
        return status


@contextmanager
def serving(tmp_path: Path, *flags: str) -> Iterator[Tree]:
    tree = Tree(tmp_path / f"tree-{free_port()}.log", *flags)
    try:
        yield tree.wait_ready()
    finally:
        if tree.popen.poll() is None:
            tree.end(signal.SIGKILL)


def quire(tree: Tree, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of the same user."""
    environment = {**os.environ, "XDG_STATE_HOME": str(tree.log.parent / "state")}
    command = [sys.executable, "-m", "quire_cli.main", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def port_of(process: psutil.Process, flag: str) -> int:
    return int(next(part.partition("=")[2] for part in process.cmdline() if part.startswith(f"{flag}=")))


def printed_command(text: str) -> list[str]:
    found = re.search(r"^  (curl .*?[^\\])$", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return shlex.split(found[1].replace("\\\n", " "))


def test_streams_go_on_when_an_engine_is_killed_and_both_it_and_the_router_come_back(tmp_path: Path) -> None:
    with serving(tmp_path, "--engines", "2", "--port", str(free_port()), *FLOAT32) as tree:
        expected = tree.client.completions.create(**STORY, extra_body=IGNORE_EOS).choices[0].text
        engines = tree.named("quire_engine.cli")
        assert len(engines) == 2
        assert re.search(r"^quire    \| KV       [\d,]{3,} tokens for each of 2 engines$", tree.text, re.MULTILINE)
        assert "quire    | dtype    float32 on cpu\n" in tree.text
        [listed] = json.loads(quire(tree, "ps", "--json").stdout)
        assert (listed["pid"], listed["url"], listed["ready_engines"]) == (tree.popen.pid, tree.url, 2)
        for engine in engines:
            with (
                grpc.insecure_channel(f"127.0.0.1:{port_of(engine, '--port')}") as channel,
                pytest.raises(grpc.RpcError) as refused,
            ):
                EngineStub(channel).Describe(DescribeRequest(), timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stream = tree.client.completions.create(**STORY, stream=True, extra_body=IGNORE_EOS)
        text = next(stream).choices[0].text
        busy = [e for e in engines if metric(port_of(e, "--metrics-port"), "quire_engine_running_sequences")]
        assert len(busy) == 1
        busy[0].kill()
        assert text + "".join(chunk.choices[0].text for chunk in stream) == expected
        [router] = tree.named("quire_router.main")
        router.kill()
        eventually(lambda: fetch(int(tree.url.rpartition(":")[2]), "/health")[0] == 200, timeout=120)
        assert tree.client.completions.create(**STORY, extra_body=IGNORE_EOS).choices[0].text == expected
        eventually(lambda: len(tree.named("quire_engine.cli")) == 2, timeout=120)
        assert {busy[0].pid, router.pid}.isdisjoint(process.pid for process in tree.processes)
        assert tree.end() == 130


@pytest.mark.soak
def test_two_trees_run_beside_each_other_and_each_ends_alone(tmp_path: Path) -> None:
    first, second = Tree(tmp_path / "first.log"), Tree(tmp_path / "second.log", "--host", "127.0.0.2")
    try:
        assert first.wait_ready().url.startswith("http://127.0.0.1:")
        assert second.wait_ready().url.startswith("http://127.0.0.2:")
        if shutil.which("curl") is not None:
            answer = subprocess.run(printed_command(first.text), capture_output=True, text=True, check=True, timeout=60)
            data = [line.removeprefix("data: ") for line in answer.stdout.splitlines() if line.startswith("data: ")]
            assert data[-1] == "[DONE]"
            assert "12" in "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in data[:-1])
        chat = [sys.executable, "-m", "quire_cli.main", "chat", "--url", first.url, "--temperature", "0"]
        asked = subprocess.run([*chat, "What is 7 plus 5?"], capture_output=True, text=True, timeout=60, check=True)
        assert "12" in asked.stdout
        assert first.end(signal.SIGTERM) == 143
        assert second.client.models.list().data[0].id == NAME
        assert second.end(signal.SIGKILL) == -signal.SIGKILL
    finally:
        for tree in (first, second):
            tree.kill()


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.soak)])
def test_an_answer_goes_on_when_all_of_it_is_killed_and_started_again(tmp_path: Path, kills: int) -> None:
    """With nothing but the defaults: the journal is a file, and ``quire chat``'s client reads on."""
    flags = ("--port", str(free_port()), *FLOAT32)
    with serving(tmp_path, *flags) as tree:
        expected = tree.client.completions.create(**LONG, extra_body=IGNORE_EOS).choices[0].text
        chunks = ApiClient(tree.url).stream("/completions", LONG | IGNORE_EOS)
        pieces = [next(chunks) for _ in range(3)]
        assert tree.end(signal.SIGKILL) == -signal.SIGKILL
    for number in range(1, kills):
        with serving(tmp_path, *flags) as tree:
            # Few, as the engine does not wait for its reader: each kill comes before the answer is complete.
            pieces += [next(chunks) for _ in range(3 * number)]
            assert len(pieces) < 0.9 * LONG["max_tokens"]
            assert tree.end(signal.SIGKILL) == -signal.SIGKILL
    with serving(tmp_path, *flags):
        pieces += chunks
    assert "".join(choice["text"] for piece in pieces for choice in piece["choices"]) == expected


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGHUP],
    ids=["ctrl-c", "closed terminal"],
)
@pytest.mark.soak
def test_no_process_is_left_when_the_output_is_closed(tmp_path: Path, number: int) -> None:
    """As with ``quire serve … | head``: every line that is printed fails."""
    tree = Tree(tmp_path / "tree.log", "--engine-log-level=info", stdout=subprocess.PIPE)
    assert tree.popen.stdout is not None
    while b"ready: " not in tree.popen.stdout.readline():
        assert tree.popen.poll() is None
    tree.popen.stdout.close()
    assert tree.end(number) == 128 + number


@pytest.mark.parametrize(
    ("flags", "status", "told"),
    [
        (["--max-model-len", "many"], 2, "error: --max-model-len: "),
        (["--redis-url", "nowhere"], 2, "error: "),
        (["--port", "TAKEN"], 1, "error: port TAKEN is in use, which the router's REST API needs; --port chooses"),
    ],
)
def test_what_cannot_be_is_one_sentence_before_anything_starts(
    tmp_path: Path, flags: list[str], status: int, told: str
) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        tree = Tree(tmp_path / "tree.log", *(flag.replace("TAKEN", port) for flag in flags))
        assert tree.wait(60) == status
    assert tree.text.startswith(told.replace("TAKEN", port)), tree.text
    assert tree.text.count("\n") == 1


def test_a_model_that_the_engine_refuses_ends_all_with_its_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 15}))
    tree = Tree(tmp_path / "tree.log", model=folder)
    assert tree.wait(120) == 1
    assert "engine-0 | error: " in tree.text
    assert "has a head dimension of 15" in tree.text
    assert "engine-0 ended with status 1; the others are stopped" in tree.text


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "tree.log", model=tmp_path)
    assert tree.wait(60) == 1
    assert tree.text == f"error: {tmp_path} is not a model folder that can be served: it has no config.json.\n"


def test_a_model_of_the_hub_is_downloaded_and_served_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server() as hub:
        hub.add("org/demo", {file.name: file.read_bytes() for file in DEMO.iterdir() if file.is_file()})
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}.items():
            monkeypatch.setenv(name, value)
        tree = Tree(tmp_path / "tree.log", model="org/demo", name=None)
        try:
            client = tree.wait_ready().client
            assert [each.id for each in client.models.list().data] == ["org/demo"]
            assert client.models.retrieve("org/demo").id == "org/demo"
            assert client.completions.create(model="org/demo", prompt="Once", max_tokens=4).choices[0].text
            assert quire(tree, "complete", "Once", "--max-tokens", "4").stdout.startswith("Once")
            assert "error: org/demo is served at " in quire(tree, "rm", "org/demo", "--yes").stderr
            stopped = quire(tree, "stop")
            assert (stopped.returncode, stopped.stdout.splitlines()[0]) == (0, f"stopping org/demo at {tree.url}")
            assert tree.wait(1) == 143  # as SIGTERM ends it
            assert quire(tree, "ps").stderr == "no server runs here; quire serve MODEL starts one\n"
        finally:
            tree.kill()


@pytest.mark.soak
def test_a_gguf_file_of_the_hub_is_served_with_the_tokenizer_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = pieces_metadata() | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}
    with hub_server() as hub:
        hub.add("org/small-GGUF", {"small-Q8_0.gguf": with_metadata(GGUF.read_bytes(), values), "small-F16.gguf": b""})
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}.items():
            monkeypatch.setenv(name, value)
        tree = Tree(tmp_path / "tree.log", *FLOAT32, model="org/small-GGUF:q8_0", name=None)
        try:
            client = tree.wait_ready().client
            assert "quire chat" in tree.text
            chat = client.chat.completions.create(
                model="org/small-GGUF",
                messages=[{"role": "user", "content": "the fox"}],
                max_tokens=6,
                extra_body=IGNORE_EOS,
            )
            assert chat.usage is not None
            assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (4, 6)
            text = client.completions.create(model="org/small-GGUF", prompt="the fox", max_tokens=6)
            assert text.usage is not None
            assert text.usage.prompt_tokens == 3
            assert tree.end() == 130
        finally:
            tree.kill()


def test_a_gguf_file_without_a_tokenizer_that_can_be_used_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "lone.gguf"
    path.write_bytes(with_metadata(GGUF.read_bytes(), {"tokenizer.ggml.model": "rwkv"}))
    tree = Tree(tmp_path / "tree.log", model=path)
    assert tree.wait(60) == 1
    assert tree.text.count("\n") == 1
    assert tree.text.endswith("): put the original model's tokenizer.json next to it.\n")


def test_more_weights_than_memory_are_refused_with_what_would_help(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    size = psutil.virtual_memory().total + (8 - psutil.virtual_memory().total % 8)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)  # sparse: none of it is written
    tree = Tree(tmp_path / "tree.log", "--port", str(free_port()), model=folder)
    assert tree.wait(60) == 1
    assert re.fullmatch(
        r"error: quire/demo needs about \S+ GiB of memory, and \S+ GiB are available: try --quantization int8 or "
        r"--quantization int4 or a smaller model\.\n",
        tree.text,
    ), tree.text
