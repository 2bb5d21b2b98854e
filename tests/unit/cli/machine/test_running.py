"""The files that running servers leave: who is listed, and which files are removed."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from quire_cli.machine.running import registered, running_servers, start_ticks

from tests.support.running_servers import a_server


def files(state_folder: Path) -> list[Path]:
    return [*(state_folder / "quire/running").glob("*")]


def test_a_server_is_listed_while_it_runs_in_a_file_that_only_its_user_reads(state_folder: Path) -> None:
    server = a_server()
    with registered(server):
        assert running_servers() == [server]
        [file] = files(state_folder)
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
    assert running_servers() == []
    assert files(state_folder) == []


def test_the_newest_is_the_first() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        older, newer = a_server(since=5.0), a_server(pid=other.pid, since=7.0)
        with registered(newer), registered(older):
            assert running_servers() == [newer, older]
        other.kill()


def test_the_file_of_a_process_that_has_ended_is_removed(state_folder: Path) -> None:
    ended = subprocess.Popen(["true"])
    server = a_server(pid=ended.pid, ticks=1)
    killed = registered(server)  # as after SIGKILL: nothing leaves the block
    killed.__enter__()
    ended.wait()
    assert len(files(state_folder)) == 1
    assert running_servers() == []
    assert files(state_folder) == []


def test_another_process_with_the_same_id_is_not_taken_for_it(state_folder: Path) -> None:
    server = a_server()
    with registered(replace(server, ticks=server.ticks - 1)):
        assert running_servers() == []
        assert files(state_folder) == []


def test_a_server_of_another_version_is_left_alone(state_folder: Path) -> None:
    with registered(a_server()):
        [file] = files(state_folder)
        file.write_text(json.dumps({**json.loads(file.read_text()), "colour": "red"}))
        assert running_servers() == []
        assert file.exists()


def test_a_folder_that_others_may_write_is_not_believed(state_folder: Path) -> None:
    with registered(a_server()):
        (state_folder / "quire/running").chmod(0o777)
        assert running_servers() == []


def test_without_a_folder_a_server_runs_unlisted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/no")
    with registered(a_server()):
        assert running_servers() == []


def test_a_process_that_has_ended_has_no_start() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert start_ticks(ended.pid) is None
