# SPDX-License-Identifier: Apache-2.0
"""The far end without processes: its messages, what it compares and unpacks, and what it sends of the logs."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.run import program
from paceline_plugins.ssh import client, far_end, program_files
from paceline_plugins.ssh.far_end import FarEnd, Mirror, Near
from paceline_plugins.ssh.follow import Mirror as Written
from paceline_plugins.ssh.hosts import Host


def sum_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def said_by(near: Near) -> list[tuple[dict[str, Any], bytes]]:
    """All messages that were sent so far."""
    source = io.BytesIO(near.target.getvalue())  # type: ignore[attr-defined]
    found = []
    while line := source.readline():
        head = json.loads(line)
        found.append((head, source.read(head["bytes"])))
    return found


def near(sent: bytes = b"") -> Near:
    return Near(io.BytesIO(sent), io.BytesIO())


def message(kind: str, data: bytes = b"", **facts: Any) -> bytes:
    return json.dumps({**facts, "kind": kind, "bytes": len(data)}).encode() + b"\n" + data


def test_it_needs_only_the_standard_library() -> None:
    tree = ast.parse(client.source())
    modules = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(modules) > 10
    names = {alias.name for node in modules if isinstance(node, ast.Import) for alias in node.names}
    assert not any(name.startswith(("paceline", "torch")) for name in names)


def test_messages_arrive_whole_and_the_end_is_one() -> None:
    one = near(message("check", b"a\nb", x=1) + message("ping") + message("bring", b"cut")[:-1])
    one.listen()
    found, data = one.messages.get_nowait()
    assert (found["kind"], found["x"], data) == ("check", 1, b"a\nb")
    assert one.messages.get_nowait()[0]["kind"] == "leave"  # the cut message is none
    assert one.gone


def test_a_near_end_that_takes_nothing_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut link leaves a full pipe that is never read: the launcher of this host must end all the same."""
    monkeypatch.setattr(far_end, "SILENCE_S", 0.1)
    reads, writes = os.pipe()
    try:
        one = Near(io.BytesIO(), far_end.Pipe(writes))
        one.say("file", bytes(1 << 20))
        assert one.gone
    finally:
        os.close(reads)
        os.close(writes)


def test_the_mirror_sends_each_byte_once_and_replaced_files_again(tmp_path: Path) -> None:
    one, folder, copy = near(), tmp_path / "logs", Written(tmp_path / "copy")
    (folder / "output").mkdir(parents=True)
    (folder / "certificates").mkdir()
    (folder / "certificates" / "key.pem").write_text("secret")
    log, place = folder / "rank-001.jsonl", folder / "output" / "rank-001.out"
    mirror = Mirror(str(folder), one)
    log.write_bytes(b"one\n")
    place.write_bytes(b"")
    mirror.look()
    mirror.look()
    log.write_bytes(b"one\ntwo\n" + bytes(far_end.CHUNK_BYTES * 2))
    mirror.look()
    os.replace(folder / "output" / "rank-001.out", folder / "gone")
    place.write_bytes(b"new")
    mirror.look(everything=True)
    for facts, data in said_by(one):
        copy.write(facts, data)
    for path in (log, place):
        assert (tmp_path / "copy" / path.relative_to(folder)).read_bytes() == path.read_bytes()
    assert not (tmp_path / "copy" / "certificates").exists()
    assert sum(len(data) for facts, data in said_by(one) if facts["path"] == log.name) == log.stat().st_size


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x", "..", ".", "", "a//b", "a\nb", "./x"])
def test_no_host_writes_outside_of_the_log_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="it sent a file with the name"):
        Written(tmp_path / "logs").write({"path": name, "offset": 0}, b"x")
    assert list(tmp_path.iterdir()) == []


def test_what_differs(tmp_path: Path) -> None:
    (tmp_path / "same").write_bytes(b"1")
    (tmp_path / "other").write_bytes(b"1")
    wanted = {"same": sum_of(b"1"), "other": sum_of(b"2"), "missing": sum_of(b"")}
    assert far_end.differing(str(tmp_path), wanted) == ["missing", "other"]


def test_a_program_is_brought_and_what_left_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(program_files, "_by_git", lambda top: None)
    source = tmp_path / "source"
    (source / "lib").mkdir(parents=True)
    (source / "train.py").write_text("import lib.a")
    (source / "lib" / "a.py").write_text("1")
    monkeypatch.chdir(source)
    far = FarEnd(near())
    found = program_files.collect(program.find(Path("train.py")), source)
    facts = {"copy": found.copy, "files": found.sums}
    assert far.on_bring(facts, found.archive(list(found.sums))) == {"differ": []}
    copy = Path(far_end.kept("programs", found.copy))
    (copy / "checkpoint").write_text("of the run")
    (source / "lib" / "a.py").unlink()
    (source / "train.py").write_text("2")
    found = program_files.collect(program.find(Path("train.py")), source)
    assert far.on_bring({"copy": found.copy, "files": found.sums}, found.archive(["train.py"])) == {"differ": []}
    assert (copy / "train.py").read_text() == "2" and (copy / "checkpoint").exists()
    assert not (copy / "lib" / "a.py").exists()


def test_an_archive_cannot_lead_out_of_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, kind in (("../../x", tarfile.REGTYPE), ("/tmp/x", tarfile.REGTYPE), ("link", tarfile.SYMTYPE)):
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w:gz") as archive:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
        with pytest.raises(ValueError, match=r"leads out of|not a file"):
            FarEnd(near()).on_bring({"copy": "p", "files": {}}, target.getvalue())


def test_which_files_are_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program_files, "_by_git", lambda top: None)
    monkeypatch.setattr(program_files, "MOST_FILE_BYTES", 100)
    for name in ("train.py", "lib/a.py", ".git/x", "__pycache__/a.pyc", "paceline-logs/x/y", "env/lib/z.py", ".secret"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "model.pt").write_bytes(bytes(101))
    (tmp_path / "mine" / "output").mkdir(parents=True)
    for name in ("rank-000.jsonl", "output/rank-000.out", "output/key.pem"):
        (tmp_path / "mine" / name).touch()
    found = program_files.collect(program.find(Path("train.py")), tmp_path)
    assert set(found.sums) == found.code == {"train.py", "lib/a.py"}
    assert found.left_out == {"model.pt": 101} and not found.too_much
    monkeypatch.setattr(program_files, "MOST_FILES", 1)
    found = program_files.collect(program.find(Path("train.py")), tmp_path)
    assert "has more than 1 files" in found.too_much
    elsewhere = program_files.collect(program.find(tmp_path / "lib" / "a.py"), tmp_path / "env")
    assert (elsewhere.base, elsewhere.words, elsewhere.path) == (tmp_path / "lib", ("a.py",), "a.py")


def test_modules_and_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(program_files, "_by_git", lambda top: None)
    (tmp_path / "pack" / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/__init__.py", "inner/train.py"):
        (tmp_path / "pack" / name).touch()
    (tmp_path / "beside.py").touch()
    found = program_files.collect(program.find(Path("pack.inner.train"), module=True), tmp_path)
    assert set(found.sums) == {"pack/__init__.py", "pack/inner/__init__.py", "pack/inner/train.py"}
    assert found.words == ("-m", "pack.inner.train")
    installed = program_files.collect(program.find(Path("json.tool"), module=True), tmp_path)
    assert (installed.sums, installed.path) == ({}, "")
    command = program_files.collect(program.find(Path("ls")), tmp_path)
    assert command.sums == {} and command.path.endswith("/ls")


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("me@b: Permission denied (publickey).", "ssh-copy-id -p 22 me@b"),
        ("Host key verification failed.", "compare the key, and answer yes"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R b"),
        ("ssh: Could not resolve hostname b: Name or service not known", "does not know the name"),
        ("ssh: connect to host b port 22: Connection refused", "no ssh server listens there"),
        ("ssh: connect to host b port 22: Connection timed out", "does not answer"),
        ("ssh: connect to host b port 22: No route to host", "does not answer"),
        (client.NO_PYTHON, "it has no Python: install Python 3.10"),
        ("SyntaxError: future feature annotations is not defined", "its Python is too old"),
        ("kex_exchange_identification: banner", "ssh ended with 255: kex_exchange_identification: banner; try ssh"),
        ("", "it said nothing"),
    ],
)
def test_what_ssh_says_means(said: str, means: str) -> None:
    assert means in client.meaning(Host("b", "me", 22), said, 255)
