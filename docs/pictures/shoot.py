# SPDX-License-Identifier: Apache-2.0
"""Takes the pictures of the live page of a real run, light and dark, with Chromium: python docs/pictures/shoot.py"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser import Browser, browser  # noqa: E402

PACELINE = (sys.executable, "-m", "paceline")
MINIBATCHES = 8000
WINDOW = (1180, 1010)
SHOWN = 5000
"""Minibatches of all workers after which the pictures are taken."""
DONE = "[...document.querySelectorAll('.card')].find(card => card.textContent.endsWith('minibatches'))?.textContent"


def shoot(page: Browser, address: str) -> None:
    """Wait until enough is done, then take both pictures."""
    page.screen(*WINDOW)
    page.open(address)
    page.wait_for(f"parseInt(({DONE} ?? '0').replace(/,/g, '')) > {SHOWN}", 600)
    for name, dark in (("live", False), ("live_dark", True)):
        page.screen(*WINDOW, dark=dark)
        page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        (FOLDER / f"{name}.png").write_bytes(page.picture(whole=False))


def main() -> None:
    """Train a small model on two workers, and look at it."""
    train = str(ROOT / "examples/char_lm/train.py")
    with tempfile.TemporaryDirectory() as home:
        log = f"{home}/char_lm"
        command = [*PACELINE, "run", "--workers", "2", "--rule", "bmuf(period=8)", "--log", log, train]
        run = subprocess.Popen([*command, "--minibatches", str(MINIBATCHES)])
        watch = subprocess.Popen([*PACELINE, "watch", "--web", "--port", "0", log], stdout=subprocess.PIPE, text=True)
        try:
            assert watch.stdout is not None
            found = re.search(r"http\S+", watch.stdout.readline())
            assert found is not None
            with browser() as page:
                shoot(page, found[0])
        finally:
            watch.terminate()
            run.terminate()
            watch.wait()
            run.wait()


if __name__ == "__main__":
    main()
