# SPDX-License-Identifier: Apache-2.0
"""Prints the path of this Python's shared library; libpaceline asks by `python -m paceline_c.where`."""

from __future__ import annotations

import os
import sys
import sysconfig


def shared_library() -> str:
    """The path of libpython; empty if this Python was built without."""
    found = [sysconfig.get_config_var(name) or "" for name in ("LIBDIR", "LIBPL", "INSTSONAME", "LDLIBRARY")]
    folders = [*found[:2], os.path.join(sys.base_prefix, "lib")]
    for folder in folders:
        for name in found[2:]:
            path = os.path.join(folder, name)
            if ".so" in name and os.path.isfile(path):
                return path
    return ""


if __name__ == "__main__":
    print(shared_library())
