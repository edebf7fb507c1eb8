# SPDX-License-Identifier: Apache-2.0
"""Pictures of five runs: what the terminal shows, and the first screen of the report at three widths.

    python screens.py before|after CHECKOUT [RUN ...]

CHECKOUT is a folder of paceline with its `.venv`; without names, all runs are made. Needs pyte, pillow and a Chromium.
"""

import html
import io
import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyte
from PIL import Image

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.browser import browser  # noqa: E402

COLUMNS, LINES = 100, 400
RUNS = {
    "calm": ("run", "--workers", "4", "train.py", "whole", "3"),
    "few_blocks": ("sim", "--workers", "64", "--rule", "bmuf(period=16)", "train.py", "whole", "2"),
    "broken_worker": ("run", "--workers", "2", "broken.py"),
    "failing": ("run", "--workers", "2", "--rule", "bmuf(period=16)", "train.py", "failing", "2"),
    "one_worker": ("run", "--workers", "1", "train.py", "whole", "2"),
}
SCALE = 0.65
"""Of the pictures of reports, which are kept small."""
SCREENS = ((390, 844), (1024, 768), (1440, 900))
STYLE = (
    "body { margin: 0; background: #fff; color: #24292e; width: max-content } "
    "pre { font: 13px/1.3 'DejaVu Sans Mono', monospace; margin: 0; padding: 10px }"
)


def terminal(command: list[str], folder: Path) -> tuple[list[str], list[str], int]:
    """What a terminal shows after a command, what it showed half-way, and the exit code."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": "50"}
    process = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen: list[list[str]] = []
    latest = time.monotonic()
    while True:
        ready, _, _ = select.select([ours], [], [], 0.5)
        try:
            data = os.read(ours, 1 << 16) if ready else b""
        except OSError:
            break
        if ready and not data:
            break
        stream.feed(data)
        if time.monotonic() - latest > 1:
            latest = time.monotonic()
            seen.append(shown(screen))
    return shown(screen), seen[len(seen) * 2 // 3] if seen else [], process.wait()


def shown(screen: pyte.Screen) -> list[str]:
    lines = [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def take(which: str, paceline: Path, names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as home, browser() as page:
        for name in names or RUNS:
            arguments = RUNS[name]
            folder = Path(home) / name
            folder.mkdir()
            for program in ("train.py", "broken.py"):
                shutil.copy(HERE / program, folder)
            end, halfway, code = terminal([str(paceline), *arguments], folder)
            logs = next(iter((folder / "paceline-logs").iterdir()))
            text = ["$ paceline " + " ".join(arguments), *end, f"(exit code {code})"]
            text += ["", "two thirds of the way:", *halfway[-2:]] if halfway else []
            report = ["report", *([str(logs.relative_to(folder))] if which == "before" else [])]
            again, _, _ = terminal([str(paceline), *report], folder)
            text += ["", f"$ paceline {' '.join(report)}", *again]
            (HERE / f"{name}_{which}.txt").write_text("\n".join(text) + "\n")
            draw_terminal(page, text, folder / "terminal.html", HERE / f"{name}_{which}_terminal.png")
            pages = [place / "report/index.html" for place in (folder, logs)]
            for one in [one for one in pages if one.exists()]:
                first_screens(page, one, HERE / f"{name}_{which}_report.webp")


def draw_terminal(page, text: list[str], drawn: Path, target: Path) -> None:
    drawn.write_text(f"<meta charset=utf-8><style>{STYLE}</style><pre>{html.escape(chr(10).join(text))}</pre>")
    page.screen(830, 200)
    page.open(drawn.as_uri())
    Image.open(io.BytesIO(page.picture())).convert("L").quantize(8).save(target, optimize=True)


def first_screens(page, report: Path, target: Path) -> None:
    """The first screen of a page at each width, side by side."""
    pictures = []
    for width, height in SCREENS:
        page.screen(width, height)
        page.errors.clear()
        page.open(report.as_uri())
        time.sleep(1)  # the charts are drawn
        wide = page.run("document.documentElement.scrollWidth - innerWidth")
        print(target.name, width, "wider by", wide, "errors", page.errors)
        pictures.append(Image.open(io.BytesIO(page.picture(whole=False))).convert("RGB"))
    sheet = Image.new("RGB", (sum(p.width + 20 for p in pictures) - 20, max(p.height for p in pictures)), "#888888")
    left = 0
    for picture in pictures:
        sheet.paste(picture, (left, 0))
        left += picture.width + 20
    small = sheet.resize((round(SCALE * sheet.width), round(SCALE * sheet.height)), Image.LANCZOS)
    small.save(target, quality=40, method=6)


if __name__ == "__main__":
    take(sys.argv[1], Path(sys.argv[2]).resolve() / ".venv/bin/paceline", sys.argv[3:])
