"""What ``quire serve`` starts: processes with their ports, names and bounds."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from quire_cli.serve.flags import read_flags
from quire_cli.serve.plan import Plan, make_plan
from quire_cli.serve.ports import PortError, Ports
from quire_cli.serve.ready_message import has_template
from quire_engine.config import EngineConfig
from quire_proto.cli import read_settings
from quire_proto.engine_token import read_tokens
from quire_router.config import Settings

from tests.support.gguf_files import pieces_metadata, with_metadata
from tests.support.ports import free_port

GGUF = Path(__file__).parents[3] / "model" / "quantized" / "llama.gguf"


@pytest.fixture(autouse=True)
def _no_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("QUIRE_ENGINE_", "QUIRE_ROUTER_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def plan(*arguments: str, gpus: Sequence[str] = ()) -> Plan:
    return make_plan(read_flags(["model", *arguments]), Path("model"), Ports(lambda *_: None), gpus)


def engines(plan: Plan) -> list[EngineConfig]:
    return [read_settings(EngineConfig, program.arguments) for program in plan.programs if program.kind == "engine"]


def router(plan: Plan) -> Settings:
    return read_settings(Settings, plan.programs[-1].arguments)


def test_the_router_knows_every_engine_by_its_address() -> None:
    made = plan("--engines", "3")
    assert [program.name for program in made.programs] == ["engine-0", "engine-1", "engine-2", "router"]
    assert router(made).engine == [f"127.0.0.1:{engine.port}" for engine in engines(made)]
    assert len({port for engine in engines(made) for port in (engine.port, engine.metrics_port)}) == 6


def test_engines_that_share_experts_have_a_rank_each_and_one_place_to_meet() -> None:
    made = plan("--data-parallel-size", "3", "--all2all-backend", "alltoall")
    assert [engine.data_parallel_rank for engine in engines(made)] == [0, 1, 2]
    assert {engine.data_parallel_size for engine in engines(made)} == {3}
    assert [program.grouped for program in made.programs] == [True, True, True, False]
    (port,) = {engine.data_parallel_rpc_port for engine in engines(made)}
    assert port not in {port for engine in engines(made) for port in (engine.port, engine.metrics_port)}
    assert router(made).engine == [f"127.0.0.1:{engine.port}" for engine in engines(made)]
    assert made.engine.kv_cache_memory == 512 << 20
    assert plan("--data-parallel-size", "2", "--engines", "2").engines == 2
    alone = plan("--data-parallel-size", "1", "--engines", "2")
    assert alone.engine.data_parallel_size == 1
    assert not any(program.grouped for program in alone.programs)


def test_a_variable_does_not_make_engines_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ENGINE_DATA_PARALLEL_SIZE", "2")
    with pytest.raises(ValueError, match="a variable does not say how many"):
        plan("--engines", "2")


def test_each_start_has_a_token_of_its_own_that_only_this_user_can_read() -> None:
    first, second = plan("--engines", "2"), plan()
    (file,) = {settings.engine_token_file for settings in (*engines(first), router(first))}
    assert file is not None
    token = read_tokens(file).values[0].decode()
    assert not any(token in argument for program in first.programs for argument in program.arguments)
    assert not any(token in value for program in first.programs for value in program.environment.values())
    assert file.parent.stat().st_mode & 0o077 == 0, "nobody else may look into the folder"
    assert not file.is_file() or not file.resolve().exists(), "nothing is on a disk"
    other = router(second).engine_token_file
    assert other is not None
    assert read_tokens(other) != read_tokens(file)


def test_a_token_file_of_the_users_is_for_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-enough-letters")
    made = plan("--engine-token-file", str(file))
    assert {settings.engine_token_file for settings in (*engines(made), router(made))} == {file}
    monkeypatch.setenv("QUIRE_ROUTER_ENGINE_TOKEN_FILE", str(file))
    with pytest.raises(ValueError, match="set for the router alone: give it to the engines too"):
        plan()


def test_names_are_those_of_the_flag_or_the_folder() -> None:
    made = plan("--served-model-name", "Qwen/Qwen3-0.6B,small")
    assert engines(made)[0].served_model_name == ["Qwen/Qwen3-0.6B", "small"]
    assert router(made).models == {"Qwen/Qwen3-0.6B": Path("model"), "small": Path("model")}
    assert made.name == "Qwen/Qwen3-0.6B"
    assert plan().name == "model"


def test_a_name_that_is_given_twice_counts_once() -> None:
    made = plan("--served-model-name", "small,large", "--served-model-name", "small")
    assert engines(made)[0].served_model_name == ["small", "large"]


@pytest.mark.parametrize(
    ("folder", "name"),
    [("my model", "my-model"), ("mödel 1", "m-del-1"), ("_a=b", "a-b"), ("模型", "model"), ("m" * 200, "m" * 128)],
)
def test_a_folder_of_any_name_is_served(folder: str, name: str, tmp_path: Path) -> None:
    made = make_plan(read_flags([folder]), tmp_path / folder, Ports(lambda *_: None))
    assert router(made).models == {name: tmp_path / folder}


@pytest.mark.parametrize("ignored", ["", "state", "~/state"])
def test_a_folder_of_state_that_is_no_absolute_path_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ignored: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", ignored)
    file = router(plan()).journal_file
    assert file is not None
    assert file.is_relative_to(tmp_path / ".local" / "state" / "quire")


def test_without_a_home_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 3)  # an id that has no name
    with pytest.raises(ValueError, match="set HOME, name a --journal-file, or say --no-journal"):
        plan()
    assert plan("--no-journal").programs


def test_a_gguf_file_is_the_engines_and_its_folder_the_routers(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    file.touch()
    (tmp_path / "tokenizer.json").touch()
    made = make_plan(read_flags([str(file)]), file, Ports(lambda *_: None))
    assert engines(made)[0].model == file
    assert router(made).models == {"small": tmp_path}


def test_a_gguf_file_that_lies_alone_has_its_tokenizer_made_for_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "small.gguf"
    file.write_bytes(with_metadata(GGUF.read_bytes(), pieces_metadata()))
    made = make_plan(read_flags([str(file)]), file, Ports(lambda *_: None))
    assert engines(made)[0].model == file
    assert router(made).models == {"small": made.tokenizer}
    assert [made.tokenizer] == list((tmp_path / "cache" / "quire").iterdir())
    assert not has_template(made.tokenizer)


def test_other_ports_follow_the_one_that_was_named() -> None:
    port = free_port()
    settings = router(plan("--port", str(port)))
    assert settings.http_port == port
    assert port < settings.grpc_port < settings.metrics_port


def test_ports_of_variables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    http, grpc, engine = free_port(), free_port(), free_port()
    monkeypatch.setenv("QUIRE_ROUTER_HTTP_PORT", str(http))
    monkeypatch.setenv("QUIRE_ROUTER_GRPC_PORT", str(grpc))
    monkeypatch.setenv("QUIRE_ENGINE_PORT", str(engine))
    made = plan("--engines", "2")
    assert (router(made).http_port, router(made).grpc_port) == (http, grpc)
    assert [config.port for config in engines(made)] == [engine, engine + 10]


def test_a_port_for_two_is_refused() -> None:
    port = str(free_port())
    with pytest.raises(PortError, match="wanted twice"):
        plan("--port", port, "--engine-port", port)


@pytest.mark.parametrize(
    ("arguments", "variable", "pool"),
    [
        (["--engines", "2"], None, 512 << 20),
        (["--engines", "1"], None, None),
        (["--engines", "2", "--kv-cache-memory", "5"], None, 5),
        (["--engines", "2", "--gpu-memory-utilization", "0.3"], None, None),
        (["--engines", "2"], "QUIRE_ENGINE_GPU_MEMORY_UTILIZATION", None),
    ],
)
def test_several_engines_have_bounded_pools_unless_someone_decided_otherwise(
    arguments: list[str], variable: str | None, pool: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, "0.3")
    assert [engine.kv_cache_memory for engine in engines(plan(*arguments))] == [pool] * int(arguments[1])


def test_an_engine_with_gpus_of_its_own_has_their_memory_for_itself() -> None:
    made = plan("--engines", "2", gpus=["0", "1"])
    assert [engine.kv_cache_memory for engine in engines(made)] == [None, None]
    on_cpu = plan("--engines", "2", "--device", "cpu", gpus=["0", "1"])
    assert [engine.kv_cache_memory for engine in engines(on_cpu)] == [512 << 20] * 2


def test_the_log_is_brief_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {engines(plan())[0].log_level, router(plan()).log_level} == {"warning"}
    monkeypatch.setenv("QUIRE_ENGINE_LOG_LEVEL", "info")
    made = plan("--router-log-level", "debug")
    assert (engines(made)[0].log_level, router(made).log_level) == ("info", "debug")


def test_each_engine_gets_gpus_of_its_own() -> None:
    gpus = ["3", "GPU-8f", "1", "0"]  # those that the user's CUDA_VISIBLE_DEVICES names
    made = plan("--engines", "2", "--tensor-parallel-size", "2", gpus=gpus)
    assert [program.environment.get("CUDA_VISIBLE_DEVICES") for program in made.programs] == ["3,GPU-8f", "1,0", None]
    on_cpus = plan("--engines", "2", "--device", "cpu", gpus=gpus)
    assert not any("CUDA_VISIBLE_DEVICES" in program.environment for program in on_cpus.programs)
    with pytest.raises(ValueError, match="3 engines of 2 GPUs each need 6, and there are 4"):
        plan("--engines", "3", "--tensor-parallel-size", "2", gpus=gpus)
    (engine, _) = plan(
        "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--engines", "1", gpus=gpus
    ).programs
    assert "CUDA_VISIBLE_DEVICES" not in engine.environment, "one engine has all"
    with pytest.raises(ValueError, match="2 engines of 4 GPUs each need 8, and there are 4"):
        plan("--engines", "2", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", gpus=gpus)


def test_requests_wait_for_engines_that_compile_their_kernels() -> None:
    assert router(plan()).hold_timeout == 300
    assert router(plan("--hold-timeout", "5")).hold_timeout == 5


def test_requests_are_kept_in_a_file_of_the_model_and_the_port(tmp_path: Path) -> None:
    port = free_port()
    journal = router(plan("--port", str(port), "--served-model-name", "org/m")).journal_file
    assert journal == tmp_path / f"state/quire/org--m-{port}/journal.sqlite"
    assert journal.parent.stat().st_mode & 0o077 == 0, "it holds what clients wrote"


@pytest.mark.parametrize(
    "arguments",
    [["--no-journal"], ["--redis-url", "redis://127.0.0.1"], ["--redis-url", "redis://127.0.0.1", "--workers", "2"]],
)
def test_requests_are_kept_elsewhere_where_that_is_said(arguments: list[str], tmp_path: Path) -> None:
    assert router(plan(*arguments)).journal_file is None
    assert not (tmp_path / "state").exists()


def test_a_journal_that_was_named_is_used(tmp_path: Path) -> None:
    assert router(plan("--journal-file", str(tmp_path / "mine"))).journal_file == tmp_path / "mine"
