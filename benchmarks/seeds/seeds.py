# SPDX-License-Identifier: Apache-2.0
"""Five articles, from which the project was made: what each claims, and whether our figure reaches it.

    python benchmarks/seeds/seeds.py [--write] [--quick]

Our figures are read from the files of the records, so this takes seconds; each record has the command that makes its
own. `--write` makes `docs/evidence/claims.md` of the table. The last line is a JSON object: `reached`, `of`, and
`claims`, each claim's `says`, `asks`, `figure` (null where nothing was measured), `reached`, `record` and `why`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
from _figures import Figures

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "claims.md"
ARTICLES = {
    "bmuf": "BMUF (K. Chen, Q. Huo, ICASSP 2016)",
    "bmuf_adam": "BMUF-Adam (K. Chen, H. Ding, Q. Huo, ICASSP 2020)",
    "ddl": "DDL (M. Cho et al., 1708.02188)",
    "learning": "LightRNN, DC-ASGD, dual learning (1610.09893, 1609.08326, 1611.00179)",
    "middleware": "A middleware for GPUs on several machines (Alibaba iDST, 2016)",
}
CLAIMS = json.loads(Path(__file__).with_name("claims.json").read_text(encoding="utf-8"))
"""What each article reports (`says`), what our figure has to be to have reached it, in words (`asks`) and as a number
(`at_most` or `at_least`), how it is read from the record, and of a claim that is not reached what was measured (`why`).
A figure of the unit "share" is shown in %, with its sign."""


def row_of(claim: dict[str, Any]) -> dict[str, Any]:
    """A claim with our figure."""
    figure = Figures(claim["record"]).value(claim["figure"])
    return {
        "article": claim["article"],
        "says": claim["says"],
        "asks": claim["asks"],
        "figure": None if figure is None else round(figure, 4),
        "unit": claim.get("unit", ""),
        "reached": figure is not None and reached(claim, figure),
        "record": claim["record"],
        "why": claim.get("why", ""),
    }


def reached(claim: dict[str, Any], figure: float) -> bool:
    """Whether a figure is what the claim asks for."""
    return claim.get("at_least", figure) <= figure <= claim.get("at_most", figure)


def figure_text(row: dict[str, Any]) -> str:
    """A figure as a reader takes it in."""
    if row["figure"] is None:
        return "not measured"
    if row["unit"] == "share":
        return f"{100 * row['figure']:+.2g} %"
    return f"{row['figure']:.3g} {row['unit']}".strip().replace(" x", "x")


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The page of the documentation."""
    reached = sum(row["reached"] for row in rows)
    lines = [
        "# Claims of five articles, and ours",
        "",
        f"paceline was made from five articles. {reached} of their {len(rows)} claims are reached here, at the size of "
        "two cores. `python benchmarks/seeds/seeds.py --write` makes this page from the records.",
    ]
    for key, title in ARTICLES.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| the article | asked of us | ours | reached | record |",
            "| --- | --- | --- | --- | --- |",
        ]
        for row in (row for row in rows if row["article"] == key):
            mark = "yes" if row["reached"] else f"**no**: {row['why']}" if row["why"] else "**no**"
            link = f"[{row['record'].split('_', 1)[1].replace('_', ' ')}](../../records/{row['record']}/README.md)"
            lines.append(f"| {row['says']} | {row['asks']} | {figure_text(row)} | {mark} | {link} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"make {PAGE.name}")
    args = _quick.parse(parser)
    rows = [row_of(claim) for claim in CLAIMS]
    for row in rows:
        print(f"{'yes' if row['reached'] else 'no ':4}{row['says']:48}{figure_text(row):>14}   {row['asks']}")
    if args.write:
        PAGE.write_text(page(rows), encoding="utf-8")
    print(json.dumps({"reached": sum(row["reached"] for row in rows), "of": len(rows), "claims": rows}))


if __name__ == "__main__":
    main()
