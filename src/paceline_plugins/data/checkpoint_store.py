# SPDX-License-Identifier: Apache-2.0
"""Steps in an object store, or wherever fsspec writes: the manifest is written last; without it there is no step.

obstore (`paceline[remote]`) opens `s3://`, `gs://` and Azure's URLs, fsspec (a dependency of torch) all others. Each
reads credentials and endpoints from the environment. Before a step is read, the files that a worker needs are fetched
into a temporary directory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from paceline.checkpoint.claim import Claim, held_by, in_use, sign_of
from paceline.checkpoint.files import (
    FROZEN,
    MANIFEST,
    OURS,
    STEP,
    Content,
    Needed,
    Working,
    all_well,
    frozen_name,
    manifest_text,
    read_manifest,
    step_name,
    write_missing,
    write_model,
    write_rank,
)
from paceline.checkpoint.saving import merged, named, named_by
from paceline.checkpoint.urls import OBSTORE_SCHEMES, redacted, scheme_of, shown
from paceline.communication import Transport
from paceline.core import runtime
from paceline.core.world import host_name
from paceline.errors import CheckpointError, UnsupportedError

logger = logging.getLogger("paceline")

LEASE = "paceline-lease/lease.json"
RENEW_S = 20.0
"""Seconds from one renewal of a lease to the next."""


class FileTree(Protocol):
    """A tree of files; names are relative, with slashes."""

    def names(self, folder: str) -> list[str]:
        """All files in `folder` and below; "" for everything."""

    def put(self, file: Path, name: str) -> None:
        """Store a file."""

    def get(self, name: str, file: Path) -> None:
        """Fetch a file."""

    def delete(self, name: str) -> None:
        """Delete a file; nothing happens where there is none."""


class ObjectStoreTree:
    """An object store through obstore."""

    def __init__(self, url: str) -> None:
        import obstore
        import obstore.store

        self._obstore: Any = obstore
        settings: dict[str, Any] = {}
        endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
        if endpoint.startswith("http://"):
            settings["client_options"] = {"allow_http": True}  # the user asked for a connection without TLS
        self._store: Any = obstore.store.from_url(url, **settings)

    def names(self, folder: str) -> list[str]:
        pages = self._obstore.list(self._store, prefix=folder or None)
        return [str(one["path"]) for page in pages for one in page]

    def put(self, file: Path, name: str) -> None:
        self._obstore.put(self._store, name, file)

    def get(self, name: str, file: Path) -> None:
        with file.open("wb") as out:
            for chunk in self._obstore.get(self._store, name).stream():
                out.write(chunk)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError, self._obstore.exceptions.NotFoundError):
            self._obstore.delete(self._store, name)


class FsspecTree:
    """A file system of fsspec."""

    def __init__(self, url: str) -> None:
        import fsspec

        self._files, self._root = fsspec.core.url_to_fs(url)

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def names(self, folder: str) -> list[str]:
        at = self._at(folder).rstrip("/")
        self._files.invalidate_cache()
        found = self._files.find(at) if self._files.exists(at) else []
        start = len(self._files._strip_protocol(self._root).rstrip("/")) + 1
        return [str(one)[start:] for one in found]

    def put(self, file: Path, name: str) -> None:
        self._files.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
        with file.open("rb") as source, self._files.open(self._at(name), "wb") as target:
            shutil.copyfileobj(source, target, 1 << 22)

    def get(self, name: str, file: Path) -> None:
        with self._files.open(self._at(name), "rb") as source, file.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 22)

    def delete(self, name: str) -> None:
        if self._files.exists(self._at(name)):
            self._files.rm_file(self._at(name))


def open_tree(url: str) -> FileTree:
    """The tree below a URL.

    Raises:
        UnsupportedError: no installed library opens it.
    """
    with_obstore = scheme_of(url) in OBSTORE_SCHEMES and importlib.util.find_spec("obstore") is not None
    try:
        return ObjectStoreTree(url) if with_obstore else FsspecTree(url)
    except ImportError as error:
        raise UnsupportedError(
            f"{shown(url)} needs another library ({error}); for s3, gs and az, pip install 'paceline[remote]'"
        ) from None
    except Exception as error:  # each client library has its own errors
        raise UnsupportedError(f"{shown(url)} cannot be opened: {_line(error)}") from None


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {redacted(str(error).partition(chr(10))[0])[:300]}"


class RemoteStore:
    """Steps under a URL.

    Args:
        url: the folder of the steps.
    """

    def __init__(self, url: str) -> None:
        self._tree, self.shown = open_tree(url), shown(url).rstrip("/")
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def name(self, number: int) -> str:
        return f"{self.shown}/{step_name(number)}"

    def numbers(self) -> list[int]:
        return [number for number, names in _steps(self._names()).items() if MANIFEST in names]

    def _names(self, folder: str = "") -> list[str]:
        found: list[str] = self._try("listed", lambda: self._tree.names(folder))
        return found

    def _try(self, what: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # each client library has its own errors
            raise CheckpointError(f"{self.shown} cannot be {what}: {_line(error)}") from None

    def fetch(self, number: int, needed: Needed) -> Path:
        folder = self._temporary_folder() / step_name(number)
        folder.mkdir(exist_ok=True)
        self._get(number, MANIFEST, folder)
        for name in needed(read_manifest(folder)):
            self._get(number, name, folder)
        return folder

    def _temporary_folder(self) -> Path:
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True)
        return Path(self._temporary.name)

    def _get(self, number: int, name: str, folder: Path) -> None:
        self._try("read", lambda: self._tree.get(f"{step_name(number)}/{name}", folder / name))

    def write(
        self,
        number: int,
        transport: Transport,
        about: dict[str, Any],
        content: Callable[[], Content],
        working: Working,
    ) -> tuple[int, bool]:
        world, maker = transport.world, transport.world.rank == 0
        problem = self._tried(lambda: self._remove(number, [MANIFEST])) if maker else ""  # the old step ends here
        all_well(transport, problem, "could not be started")
        sums: dict[str, str] = {}
        sizes: list[int] = []
        frozen: dict[str, tuple[str, Tensor]] = {}

        def files() -> None:
            brought = content()
            frozen.update(brought.frozen)
            sizes.append(self._put_rank(number, world.rank, brought, sums))
            if maker:
                rest()

        def rest() -> None:
            sizes.append(self._put_frozen(frozen))

        def carry_out(action: Callable[[], None]) -> None:
            nonlocal problem
            problem = self._tried(action)

        working(transport, lambda: carry_out(files))
        everybody = all_well(transport, problem, "could not be written", sums | named(frozen))
        if keys := named_by(everybody):  # a tensor that has changed on rank 0 only
            working(transport, lambda: carry_out(rest))
            all_well(transport, problem, "could not be written")
        if maker:
            text = manifest_text(about, world.size, merged(everybody), keys)
            problem = self._tried(lambda: self._put_bytes(text.encode(), f"{step_name(number)}/{MANIFEST}"))
        all_well(transport, problem, "could not be finished")
        return sum(sizes), maker

    @staticmethod
    def _tried(action: Callable[[], Any]) -> str:
        """An error message, or ""."""
        try:
            action()
        except Exception as error:  # the other workers wait for a reply
            return _line(error)
        return ""

    def _put_rank(self, number: int, rank: int, content: Content, sums: dict[str, str]) -> int:
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            sums |= write_rank(Path(folder), rank, content)
            if rank == 0:
                sums |= write_model(Path(folder), content.model)
            for name in sums:
                self._tree.put(Path(folder) / name, f"{step_name(number)}/{name}")
            return sum((Path(folder) / name).stat().st_size for name in sums)

    def _put_frozen(self, frozen: dict[str, tuple[str, Tensor]]) -> int:
        """Store the frozen tensors that are not there yet, one by one; the bytes stored."""
        there = self._names(FROZEN) if frozen else []
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            nbytes = 0
            for key, one in frozen.items():
                if (name := f"{FROZEN}/{frozen_name(key)}") not in there:
                    nbytes += write_missing(Path(folder) / FROZEN, {key: one})
                    self._tree.put(Path(folder) / name, name)
                    (Path(folder) / name).unlink()
            return nbytes

    def frozen(self, key: str) -> Path:
        file = self._temporary_folder() / frozen_name(key)
        self._try("read", lambda: self._tree.get(f"{FROZEN}/{frozen_name(key)}", file))
        return file

    def _put_bytes(self, data: bytes, name: str) -> None:
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            file = Path(folder) / "data"
            file.write_bytes(data)
            self._tree.put(file, name)

    def tidy(self, keep: int) -> None:
        there = self._names()
        steps = _steps(there)
        whole = [number for number, names in steps.items() if MANIFEST in names]
        stale = [number for number in steps if number not in whole and number < whole[-1]] if whole else []
        for number in [*whole[:-keep], *stale]:
            self._remove(number, steps[number])
        frozen = [name for name in there if name.startswith(f"{FROZEN}/")]
        stay = (
            {f"{FROZEN}/{frozen_name(key)}" for n in whole[-keep:] for key in self._frozen_of(n)} if frozen else set()
        )
        for name in frozen:
            if name not in stay:
                self._try("tidied", partial(self._tree.delete, name))

    def _frozen_of(self, number: int) -> list[str]:
        """The keys of the frozen tensors that a step names."""
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            self._get(number, MANIFEST, Path(folder))
            found: list[str] = read_manifest(Path(folder)).get("frozen", [])
            return found

    def _remove(self, number: int, names: Iterable[str]) -> None:
        for name in sorted(names, key=lambda name: name != MANIFEST):  # the manifest first: without it there is no step
            self._try("tidied", partial(self._tree.delete, f"{step_name(number)}/{name}"))

    def set_aside(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._remove(number, [MANIFEST])

    def claim(self, run: str) -> Claim:
        def write(data: bytes) -> None:
            self._try("written", lambda: self._put_bytes(data, LEASE))

        def delete() -> None:
            self._try("tidied", lambda: self._tree.delete(LEASE))

        return Lease(self.shown, run, self._read_lease, write, delete)

    def _read_lease(self) -> bytes:
        folder, _, _ = LEASE.rpartition("/")
        if LEASE not in self._try("listed", lambda: self._tree.names(folder)):
            return b""
        with tempfile.TemporaryDirectory(prefix="paceline-") as place:
            file = Path(place) / "lease"
            self._try("read", lambda: self._tree.get(LEASE, file))
            return file.read_bytes()

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None


def _steps(names: Iterable[str]) -> dict[int, list[str]]:
    """Number -> names of the files of a step, oldest first; files of others are skipped."""
    found: dict[int, list[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        match = STEP.fullmatch(folder)
        if match and OURS.fullmatch(file):
            found.setdefault(int(match[1]), []).append(file)
    return dict(sorted(found.items()))


class Lease:
    """A claim to a store without locks: an object, which the run renews.

    A run takes over the lease of another run if it is no longer renewed, or if its process is known to have ended. A
    run that finds another run's lease instead of its own writes no more steps and ends.

    Args:
        shown: the store's name for messages.
        run: the name of the run.
        read: returns the lease's bytes; empty if there is none.
        write: replaces it.
        delete: removes it.
    """

    def __init__(
        self,
        shown: str,
        run: str,
        read: Callable[[], bytes],
        write: Callable[[bytes], None],
        delete: Callable[[], None],
    ) -> None:
        self._shown, self._run = shown, run
        self._read, self._write, self._delete = read, write, delete
        self._over = runtime.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        holder = held_by(self._read())
        if holder and holder.get("run") != self._run and not _gone(holder):
            self._await_end(holder)
        self._renew()
        self._thread = runtime.thread(self._keep, "paceline-lease")
        self._thread.start()

    def check(self) -> None:
        holder = held_by(self._read())
        if holder and holder.get("run") != self._run:
            raise in_use(self._shown, holder)

    def release(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(RENEW_S)
            self._thread = None
            with contextlib.suppress(CheckpointError):
                self.check()
                self._delete()

    def _await_end(self, first: dict[str, Any]) -> None:
        """A lease that is not renewed for two and a half times its renewal period has expired."""
        logger.warning("%s: waiting to see whether process %s on %s still writes here", *self._who(first))
        until = runtime.monotonic() + 2.5 * RENEW_S
        while runtime.monotonic() < until:
            holder = held_by(self._read())
            if not holder or holder.get("run") == self._run:
                return
            if holder != first:
                raise in_use(self._shown, holder)
            runtime.sleep(min(1.0, RENEW_S / 10))

    def _who(self, holder: dict[str, Any]) -> tuple[Any, Any, Any]:
        return self._shown, holder.get("pid", "?"), holder.get("host", "?")

    def _renew(self) -> None:
        self._write(json.dumps({**sign_of(self._run), "renewal": secrets.token_hex(4)}).encode())

    def _keep(self) -> None:
        """Renew the lease periodically, unless another worker of this run does, or another run took it."""
        last: dict[str, Any] = {}
        while not self._over.wait(RENEW_S):
            with contextlib.suppress(CheckpointError):  # the next step reports a store that is down
                holder = held_by(self._read())
                if holder and holder.get("run") != self._run:
                    return
                if holder == last or not holder or holder.get("pid") == runtime.pid():
                    self._renew()
                last = held_by(self._read())


def _gone(holder: dict[str, Any]) -> bool:
    """Whether the process that wrote a lease is known to have ended, or is this one."""
    pid = holder.get("pid")
    if holder.get("host") != host_name() or not isinstance(pid, int) or pid <= 0:
        return False
    return pid == runtime.pid() or not runtime.living(pid)
