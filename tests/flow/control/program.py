# SPDX-License-Identifier: Apache-2.0
"""A worker as a process of its own: PORT PLACES [fork]; writes a line for every commit, and its marks at the end."""

from __future__ import annotations

import json
import os
import signal
import sys

from paceline.errors import EXPELLED, GivenUpError
from tests.flow.control.cluster import member, work


def main() -> None:
    one = member(int(sys.argv[1]), timeout_s=60.0)
    one.doing(str(os.getpid()), 0)
    if sys.argv[3:] == ["fork"]:
        one.enter()
        child = os.fork()
        if child == 0:
            signal.pause()
        print(child, flush=True)
        signal.pause()
    try:
        merged = work(one, int(sys.argv[2]), lambda: print("commit", flush=True))
    except GivenUpError as error:
        print(json.dumps({"given_up": str(error)}), flush=True)
        sys.exit(EXPELLED)
    print(json.dumps({"marks": merged}), flush=True)
    one.leave()


if __name__ == "__main__":
    main()
