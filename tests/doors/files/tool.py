# SPDX-License-Identifier: Apache-2.0
"""A closed tool, fast to start: `tool.py IN OUT PART LR [WHAT [FILE]]`.

A model is four bytes and float32 numbers. Training adds LR (PART + 1) to each number and writes PART into the four
bytes. It prints its loss, the first number of what it was given.
"""

from __future__ import annotations

import array
import os
import shutil
import signal
import sys


def main(given: str, wanted: str, part: str, rate: str, what: str = "", file: str = "") -> int:
    """Train, or do what is asked instead; the exit code."""
    with open(given, "rb") as source:
        head, numbers = source.read(4), array.array("f", source.read())
    print(f"part {part}, rate {rate}, loss={numbers[0]}", flush=True)
    if what == "fail":
        print("no room on the device", file=sys.stderr)
        return 3
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "nothing":
        return 0
    if what == "same":
        shutil.copy(given, wanted)
        return 0
    if what == "list":
        with open(file) as lines, open(f"seen-{part}", "a") as seen:
            seen.write(lines.read() + "\n")
    numbers = array.array("f", (number + float(rate) * (int(part) + 1) for number in numbers))
    if what == "short":
        numbers = numbers[:-1]
    if what == "diverge" and part == "1":
        numbers[0] = float("nan")
    with open(wanted, "wb") as target:
        target.write(b"%4s" % part.encode() if head[:1] == b" " else head)
        target.write(numbers.tobytes())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
