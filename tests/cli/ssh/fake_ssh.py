# SPDX-License-Identifier: Apache-2.0
"""An `ssh` for tests: "hosts" are folders of this machine, each a home of its own; no network, no keys.

A folder may have the files `said` (what ssh prints, instead of connecting) and `code` (its exit code), `environment`
(lines NAME=VALUE that its shell has) and `banner` (what its shell prints first).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def install(folder: Path, *names: str) -> dict[str, str]:
    """Make the hosts in `folder`; returns the variables with which a command finds this `ssh` and them."""
    tools = folder / "bin"
    tools.mkdir(parents=True)
    script = tools / "ssh"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {folder} "$@"\n')
    script.chmod(0o755)
    for name in names:
        (folder / name).mkdir()
    return {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}


def main(folder: Path, arguments: list[str]) -> None:
    """As ssh: options, `--`, the host, the command."""
    at = arguments.index("--")
    name = arguments[at + 1].rpartition("@")[2]
    if "-G" in arguments:
        print(f"hostname {name}")
        return
    host = folder / name
    if (host / "said").exists() or not host.is_dir():
        text = (host / "said").read_text() if host.is_dir() else f"ssh: Could not resolve hostname {name}: unknown"
        sys.stderr.write(text + "\n")
        raise SystemExit(int((host / "code").read_text()) if (host / "code").exists() else 255)
    if (host / "banner").exists():
        print((host / "banner").read_text(), flush=True)
    own = {"HOME": str(host), "SSH_CONNECTION": "127.0.0.1 50000 127.0.0.1 22", "PATH": "/usr/bin:/bin"}
    if (host / "environment").exists():
        own |= dict(line.split("=", 1) for line in (host / "environment").read_text().splitlines())
    os.chdir(host)
    os.execve("/bin/sh", ["sh", "-c", " ".join(arguments[at + 2 :])], own)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
