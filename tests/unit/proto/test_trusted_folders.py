"""Folders that hold what is executed or believed: only this user, root, or a pod's group can have written there."""

import os
import stat
from pathlib import Path

import pytest
from quire_proto.folders import open_trusted, trusted_folder

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
OTHER = 65_534


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    made = trusted_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert trusted_folder(made) == made


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o770, 0o1777, 0o722])
def test_a_folder_where_others_may_write_is_not_trusted(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="others may write there"):
        trusted_folder(folder)


@as_root
def test_a_folder_that_root_gave_to_our_group_is_trusted_and_to_another_group_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getgroups", lambda: [12_345])
    folder = tmp_path / "volume"
    folder.mkdir()
    for group, good in ((12_345, True), (54_321, False)):
        os.chown(folder, 0, group)
        folder.chmod(0o2770)
        if good:
            assert trusted_folder(folder) == folder
        else:
            with pytest.raises(PermissionError):
                trusted_folder(folder)


@as_root
@pytest.mark.parametrize("volume_mode", [0o2770, 0o755])
def test_our_folder_in_a_volume_that_root_gave_to_our_group_is_trusted_and_elsewhere_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, volume_mode: int
) -> None:
    """As the kubelet leaves what an earlier pod wrote, where ``fsGroupChangePolicy`` is ``Always``."""
    group, user = 12_345, 12_000
    folder = tmp_path / "volume" / "kv" / "0"
    folder.mkdir(parents=True)
    for path, owner in ((folder, user), (folder.parent, user), (folder.parent.parent, 0)):
        os.chown(path, owner, group)
        path.chmod(0o2770)
    folder.parent.parent.chmod(volume_mode)
    monkeypatch.setattr(os, "getgroups", lambda: [group])
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if volume_mode & stat.S_ISGID:
        assert trusted_folder(folder) == folder
    else:
        with pytest.raises(PermissionError, match="others may write there"):
            trusted_folder(folder)


@as_root
@pytest.mark.parametrize("what", ["folder", "link", "target"])
def test_what_another_user_made_is_not_trusted(tmp_path: Path, what: str) -> None:
    target, path = tmp_path / "target", tmp_path / "path"
    target.mkdir()
    if what == "folder":
        path.mkdir()
        os.chown(path, OTHER, OTHER)
    else:
        path.symlink_to(target)
        os.chown(path if what == "link" else target, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(PermissionError, match="it belongs to user"):
        trusted_folder(path)


def test_no_link_leads_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir(mode=0o700)
    (tmp_path / "in" / "0").symlink_to(tmp_path / "out")
    with pytest.raises(PermissionError, match="leads out of"):
        trusted_folder(tmp_path / "in" / "0", within=tmp_path / "in")


@pytest.mark.parametrize("kind", ["symlink", "hard link", "fifo", "folder"])
def test_a_file_that_is_something_else_is_not_opened(tmp_path: Path, kind: str) -> None:
    victim, path = tmp_path / "victim.txt", tmp_path / "index"
    victim.write_bytes(b"precious")
    {
        "symlink": lambda: path.symlink_to(victim),
        "hard link": lambda: path.hardlink_to(victim),
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }[kind]()
    with pytest.raises(OSError, match=r"not trusted|symbolic links|directory"):
        open_trusted(path)
    assert victim.read_bytes() == b"precious"
