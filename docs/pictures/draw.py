# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of README.md and docs/how_it_works.md, beside this file: python docs/pictures/draw.py"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from canvas import AMBER, BLUE, GREEN, GREY, RED, Canvas

FOLDER = Path(__file__).resolve().parent
NETWORK = FOLDER.parents[1] / "records/2026-11-21_communication/network.json"
LANE, ROW = 64, 22  # where lanes begin, and their height


def lanes(
    c: Canvas, y: float, title: str, names: tuple[str, ...] = ("worker 0", "worker 1", "worker 2")
) -> list[float]:
    """A heading and one line for each worker; their tops."""
    c.word(0, y, title, bold=True)
    tops = [y + 10 + ROW * k for k in range(len(names))]
    for name, top in zip(names, tops, strict=True):
        c.word(0, top + 13, name)
    return tops


def legend(c: Canvas, y: float, entries: list[tuple[str, str]]) -> None:
    """Small boxes with what they stand for."""
    x = 0.0
    for colour, text in entries:
        c.box(x, y - 10, 12, 12, colour)
        c.word(x + 18, y, text)
        x += 30 + 7.6 * len(text)


def waits() -> Canvas:
    """Who waits for whom, in the four ways."""
    c = Canvas(520, 470, "Who waits for whom: synchronous, blocks, blocks with overlap, asynchronous")
    legend(c, 12, [(BLUE, "minibatch"), (AMBER, "exchange"), (GREY, "waiting")])
    _every_step(c, lanes(c, 44, "Synchronous: all wait for the slowest in every step"))
    _blocks(c, lanes(c, 152, "Blocks of 4: all wait for the slowest once in 4 minibatches"))
    _overlapping(c, lanes(c, 260, "Blocks with overlap: the exchange runs during the next block"))
    _free(c, lanes(c, 368, "Asynchronous: no worker waits for another's step"))
    return c


WIDTHS = ((22, 24, 20, 23, 25, 21, 22, 24), (25, 22, 24, 21, 22, 25, 21, 23), (23, 34, 22, 25, 21, 23, 36, 22))


def _every_step(c: Canvas, tops: list[float]) -> None:
    x = float(LANE)
    for step in range(8):
        slowest = max(row[step] for row in WIDTHS)
        for top, row in zip(tops, WIDTHS, strict=True):
            c.box(x, top, row[step], 16, BLUE)
            if row[step] < slowest - 2:
                c.box(x + row[step], top, slowest - row[step], 16, GREY, fill=0.1)
        c.box(x + slowest, tops[0], 26, tops[-1] - tops[0] + 16, AMBER)
        x += slowest + 28


def _block_of(c: Canvas, tops: list[float], x: float, first: int) -> float:
    ends = []
    for top, row in zip(tops, WIDTHS, strict=True):
        at = x
        for step in range(first, first + 4):
            c.box(at, top, row[step], 16, BLUE)
            at += row[step]
        ends.append(at)
    return max(ends)


def _blocks(c: Canvas, tops: list[float]) -> None:
    x = float(LANE)
    for first in (0, 4, 0):
        end = _block_of(c, tops, x, first)
        for top, row in zip(tops, WIDTHS, strict=True):
            mine = x + sum(row[first : first + 4])
            if mine < end - 2:
                c.box(mine, top, end - mine, 16, GREY, fill=0.1)
        c.box(end, tops[0], 26, tops[-1] - tops[0] + 16, AMBER)
        x = end + 28


def _overlapping(c: Canvas, tops: list[float]) -> None:
    """A worker continues at once, and waits only where the previous exchange has not landed by its block's end."""
    at, landed, wire = [float(LANE)] * 3, 0.0, 60
    for number in range(4):
        ends = []
        for lane, top in enumerate(tops):
            widths = WIDTHS[(lane + number) % 3][4 * (number % 2) :][:4]
            for step, width in enumerate(widths):
                c.box(at[lane], top, width, 16, BLUE, fill=(0.3, 0.5)[number % 2])
                at[lane] += width
                if step == 3 and at[lane] < landed:
                    c.box(at[lane], top, landed - at[lane], 16, GREY, fill=0.1)
                    at[lane] = landed
            ends.append(at[lane])
        if number < 3:
            c.box(max(ends), tops[-1] + 20, wire, 6, AMBER)
        landed = max(ends) + wire


def _free(c: Canvas, tops: list[float]) -> None:
    for top, width in zip(tops, (24, 26, 50), strict=True):
        x = float(LANE)
        while x + width < 500:
            c.box(x, top, width, 16, BLUE)
            x += width + 1
            c.line(x, top + 16, x, top + 21, AMBER)
    c.word(LANE, tops[-1] + 34, "each mark: a gradient leaves, new parameters arrive")


def rule() -> Canvas:
    """Five choices make a rule."""
    c = Canvas(520, 330, "A rule is five choices: schedule, payload, codec, topology, outer")
    rows = [
        ("schedule", "when?", "every step - every block - each by itself", "EveryBlock(16)"),
        ("payload", "what?", "gradient - delta - parameters", "Delta()"),
        ("codec", "how written?", "32, 16, 8, 4 bits - one bit - low rank - top k", "Dense()"),
        ("topology", "which route?", "flat - in rank order - hosts first - owners", "Flat()"),
        ("outer", "how applied?", "mean - block momentum - Nesterov - ...", "BlockMomentum()"),
    ]
    for k, (name, question, values, chosen) in enumerate(rows):
        y = 4.0 + 54 * k
        c.box(0, y, 364, 44, BLUE, fill=0.12)
        c.word(10, y + 18, name, bold=True)
        c.word(90, y + 18, question)
        c.word(10, y + 36, values)
        c.arrow(364, y + 22, 386, y + 22, GREEN)
        c.box(388, y + 6, 130, 32, GREEN, chosen, fill=0.15)
    c.arrow(458, 4 + 54 * 4 + 40, 458, 290, GREEN)
    c.box(388, 292, 130, 32, GREEN, "the rule bmuf")
    c.word(378, 312, "together, under a name:", "end")
    return c


def block() -> Canvas:
    """A block of three workers in the plane of two parameters, with eta = zeta = 0.7; the places are computed."""
    c = Canvas(
        520, 350, "A block: start, the workers' deltas, block momentum, the exported model, the next start", top=64
    )
    eta = zeta = 0.7
    theta, before, d = (40.0, 316.0), (100.0, -36.0), (190.0, -150.0)
    start = (theta[0] + eta * before[0], theta[1] + eta * before[1])
    mean = (start[0] + d[0], start[1] + d[1])
    model = (start[0] + zeta * d[0], start[1] + zeta * d[1])
    following = (model[0] + eta * (model[0] - theta[0]), model[1] + eta * (model[1] - theta[1]))
    c.arrow(*theta, *start, GREY, dashed=True)
    for k, (right, down) in enumerate(((-70, -30), (60, -18), (10, 48))):
        end = (mean[0] + right, mean[1] + down)
        via = ((start[0] + end[0]) / 2 + (-16, 20, 22)[k], (start[1] + end[1]) / 2 + (-4, 22, 6)[k])
        c.line(*start, *via, BLUE)
        c.arrow(*via, *end, BLUE)
        c.word(end[0] + (-8, 6, 4)[k], end[1] + (-6, -2, 16)[k], f"worker {k}", "middle" if k == 0 else "start", BLUE)
    c.arrow(*start, *mean, GREEN)
    c.arrow(*theta, *model, AMBER)
    c.arrow(*model, *following, GREY, dashed=True)
    for place, text, x, y in (
        (theta, "theta, the global model", 10, 18),
        (start, "the block's start", 12, 14),
        (mean, "mean", -8, -8),
        (model, "", 0, 0),
        (following, "the next block's start", -20, -12),
    ):
        c.parts.append(f'<circle cx="{place[0]:g}" cy="{place[1]:g}" r="3.5" fill="{GREY}"/>')
        c.word(place[0] + x, place[1] + y, text, "end" if text == "mean" else "start")
    c.line(model[0] + 4, model[1] + 4, 316, 230)
    c.word(320, 236, "the new theta: exported")
    c.word(320, 284, "d = mean - start", colour=GREEN)
    c.word(320, 304, "Delta = eta Delta + zeta d", colour=AMBER)
    c.word(320, 324, "theta = theta + Delta", colour=AMBER)
    c.word(320, 344, "next start = theta + eta Delta")
    return c


def server() -> Canvas:
    """Each worker owns a slice and serves it."""
    c = Canvas(520, 300, "The server inside the workers: each owns a slice of the parameters")
    c.word(0, 16, "Worker 1 has a gradient: each slice of it goes to the slice's owner.", bold=True)
    colours = (BLUE, GREEN, AMBER)
    for k in range(3):
        x = 10.0 + 175 * k
        c.box(x, 190, 150, 100, GREY, fill=0.05)
        c.word(x + 75, 282, f"worker {k}", "middle")
        c.box(x + 12, 200, 126, 60, colours[k], f"owns slice {k}:\nvalues, optimizer,\nversion, lock")
    for k in range(3):
        c.box(140.0 + 80 * k, 40, 80, 30, colours[k], f"slice {k}")
    c.word(130, 60, "its gradient", "end")
    for k in range(3):
        x = 180.0 + 80 * k
        to = 60.0 + 175 * k
        c.arrow(x - 8, 72, to, 188, colours[k])
        c.arrow(to + 40, 188, x + 12, 72, colours[k], dashed=True)
    c.word(40, 120, "push", "middle")
    c.word(480, 112, "answer:", "middle")
    c.word(480, 130, "new values", "middle")
    return c


def backward() -> Canvas:
    """Gradients leave while backward goes on."""
    c = Canvas(520, 200, "Gradients leave while backward goes on")
    c.word(0, 34, "computes")
    c.word(0, 84, "network")
    x = 70.0
    for name, width in (("forward", 80), ("layer 4", 62), ("layer 3", 62), ("layer 2", 62), ("layer 1", 62)):
        c.box(x, 18, width, 26, BLUE, name)
        x += width + 2
    for k in range(4):
        left = 70 + 82 + 64 * (k + 1)
        c.box(left, 68, 60, 26, AMBER, f"grad {4 - k}")
        c.line(left, 44, left, 68, AMBER)
    c.box(470, 18, 46, 26, GREEN, "step")
    c.line(152, 104, 152, 130)
    c.line(408, 104, 408, 130)
    c.word(280, 122, "backward", "middle")
    c.line(468, 50, 468, 148, dashed=True)
    c.word(462, 144, "backward() returns:", "end")
    c.word(462, 162, ".grad holds the mean, for clipping", "end")
    c.word(462, 180, "and the optimizer's own step", "end")
    return c


def route() -> Canvas:
    """A hierarchical all-reduce over two hosts of two."""
    c = Canvas(520, 330, "Hierarchical all-reduce: inside hosts, between hosts, inside hosts")
    titles = (
        "1. inside each host: sum; each keeps a part",
        "2. between hosts: sum the parts",
        "3. inside each host: all gather",
    )
    for step, title in enumerate(titles):
        y = 110 * step
        c.word(0, y + 16, title, bold=True)
        for host in range(2):
            left = 10.0 + 270 * host
            c.box(left, y + 26, 230, 66, GREY, fill=0.05)
            for worker in range(2):
                x = left + 12 + 112 * worker
                for part, colour in enumerate((BLUE, GREEN)):
                    kept = step == 2 or part == worker
                    if step == 0 or kept:
                        c.box(x + 48 * part, y + 36, 46, 24, colour, fill=0.35 if kept else 0.08)
                c.word(x + 47, y + 80, f"worker {2 * host + worker}", "middle")
            if step != 1:
                c.arrow(left + 104, y + 64, left + 128, y + 64)
                c.arrow(left + 128, y + 70, left + 104, y + 70)
    for left, right, y, colour in ((30, 300, 207, BLUE), (220, 490, 214, GREEN)):
        c.arrow(left, y, left, 172, colour)
        c.arrow(right, y, right, 172, colour)
        c.line(left, y, right, y, colour)
    c.word(260, 136, "slow", "middle")
    c.word(260, 152, "link", "middle")
    return c


def zero() -> Canvas:
    """An unchanged program, and the effects on it from outside."""
    c = Canvas(520, 300, "Zero lines: what happens to an unchanged program")
    rows = [
        ("optimizer = SGD(...)", "detected", GREY),
        ("for x, y in train_loader:", "the rule attaches at the first batch; each worker gets its part", GREEN),
        ("    optimizer.step()", "hooked: exchanges happen here", GREEN),
        ("model.eval()", "", GREY),
        ("for x, y in test_loader:", "every worker gets all of it;with the global model", BLUE),
        ('torch.save(..., "model.pt")', "the global model; rank 0's file is kept", AMBER),
        ("print(accuracy)", "rank 0's is shown, other ranks' is logged", AMBER),
    ]
    for k, (code, text, colour) in enumerate(rows):
        y = 4.0 + 42 * k
        c.box(0, y, 200, 32, GREY, fill=0.06)
        c.parts.append(
            f'<text x="8" y="{y + 21:g}" fill="{GREY}" font-family="monospace" font-size="11" '
            f'xml:space="preserve">{code}</text>'
        )
        if text:
            c.arrow(200, y + 16, 222, y + 16, colour)
            first, _, rest = text.partition(";")
            c.word(228, y + (12 if rest else 20), first + ("," if rest else ""), colour=colour)
            if rest:
                c.word(228, y + 28, rest.strip(), colour=colour)
    return c


def death() -> Canvas:
    """A worker dies in an exchange of an elastic run."""
    c = Canvas(520, 286, "Elastic: a worker dies in an exchange, and the surviving workers repeat it")
    tops = lanes(c, 14, "Under --elastic an exchange counts when all members have all of it")
    for k, top in enumerate(tops):
        c.box(LANE, top, 90, 16, BLUE, "block 7")
        c.box(156, top, 44, 16, AMBER)
        if k != 1:
            c.box(262, top, 44, 16, AMBER, "again")
            c.box(310, top, 90, 16, BLUE, "block 8")
    c.cross(186, tops[1] + 8)
    c.word(200, tops[1] + 13, "dies", colour=RED)
    c.box(LANE, 130, 452, 26, GREY, fill=0.06)
    c.word(0, 147, "launcher")
    c.word(150, 147, "generation 1", "middle")
    c.word(205, 147, "2: without 1", colour=RED)
    c.word(308, 147, "counts", colour=GREEN)
    c.word(420, 147, "3: with 3")
    c.word(0, 191, "worker 3")
    c.box(402, 180, 44, 16, GREEN, "state")
    c.box(450, 180, 66, 16, BLUE, "block 9")
    c.arrow(402, tops[2] + 18, 418, 178, GREEN)
    c.line(202, tops[0], 202, 130, RED, dashed=True)
    c.line(306, tops[0], 306, 130, GREEN, dashed=True)
    for k, text in enumerate(
        (
            "The surviving workers send the same deltas again, from a copy.",
            "Other workers do the samples of the dead worker's block 7.",
            "A living member sends a newcomer model, momentum and position.",
        )
    ):
        c.word(0, 226 + 20 * k, text)
    return c


def efficiency() -> Canvas:
    """How much of one worker's speed each way of exchanging keeps, from the record's own figures."""
    kept = json.loads(NETWORK.read_text(encoding="utf-8"))["efficiency"]
    rows = (
        ("no_exchange", "no exchange at all (upper bound)", GREY),
        ("bmuf", "bmuf(period=16, overlap=16)", GREEN),
        ("streaming_diloco", "streaming_diloco(period=16)", GREEN),
        ("torchft_overlap", "torchft DiLoCo, in the background", AMBER),
        ("one_bit", "one_bit: gradients in 1 bit, every step", BLUE),
        ("sync", "sync: gradients, every step", BLUE),
        ("ddp", "PyTorch DDP: gradients, every step", AMBER),
    )
    c = Canvas(400, 322, "Share of one worker's speed that each of 8 workers keeps on links of 1 Gbit/s", fixed=True)
    c.word(0, 14, "Share of one worker's speed that each of 8 workers", bold=True)
    c.word(0, 31, "keeps on links of 1 Gbit/s and 1 ms", bold=True)
    for k, (name, label, colour) in enumerate(rows):
        top = 44 + 37 * k
        c.word(0, top + 12, label)
        c.box(0, top + 17, 350 * kept[name], 12, colour, fill=0.6)
        c.word(350 * kept[name] + 6, top + 28, f"{kept[name]:.3f}", bold=True)
    legend(c, 316, [(GREEN, "overlapped blocks"), (BLUE, "every step"), (AMBER, "not paceline")])
    return c


PICTURES: dict[str, Callable[[], Canvas]] = {
    "efficiency": efficiency,
    "waits": waits,
    "rule": rule,
    "block": block,
    "server": server,
    "backward": backward,
    "route": route,
    "zero": zero,
    "death": death,
}


def main() -> None:
    """Write them."""
    for name, drawn in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(drawn().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
