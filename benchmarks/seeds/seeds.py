# SPDX-License-Identifier: Apache-2.0
"""Five articles, from which the project was made: what each claims, what we have, and what speaks against it.

    python benchmarks/seeds/seeds.py [--write] [--quick]

Our figures are read from the JSON files of the records, so this takes seconds; each record has the command that makes
its own. `--write` makes `docs/evidence/claims.md`; `recompute.py` computes its figures a second time, by the page's
words. The last line is a JSON object: `rows` of the articles, `of` them that can be tried here, `reached`, `defended`
(reached; exact, computed, or of three seeds and with no fewer settings for the base line; and no record contradicts
it), and `claims`, each row with its `figures`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
from _figures import PARAMETERS, SPREAD, STEP_S, Figures

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "claims.md"
ARTICLES = {
    "bmuf": "BMUF (K. Chen, Q. Huo, ICASSP 2016)",
    "bmuf_adam": "BMUF-Adam (K. Chen, H. Ding, Q. Huo, ICASSP 2020)",
    "ddl": "DDL (M. Cho et al., 1708.02188)",
    "learning": "LightRNN, DC-ASGD, dual learning (1610.09893, 1609.08326, 1611.00179)",
    "middleware": "A middleware for GPUs on several machines (Alibaba iDST, 2016)",
    "own": "Not the articles'",
}
OWN = "own"
CLAIMS = json.loads(Path(__file__).with_name("claims.json").read_text(encoding="utf-8"))
"""What a claim is about (`says`), the article's figure (`theirs`) and what it `asks` of us, in words and as a number
(`at_most` or `at_least`), of the figure `s`. `figures` are expressions of `_figures.py` with their units, and stand in
`samples`, `quality` and `against`. `kind` is how `s` came about, `rates` the settings that the base line and ours chose
from, `not_kept` the figures without a value of each seed."""
Row = dict[str, Any]
Claim = dict[str, Any]


def figures_of(claim: Claim) -> dict[str, float]:
    """The figures of a claim, by name."""
    return {name: Figures(claim["record"]).value(expression) for name, (expression, _) in claim["figures"].items()}


def row_of(claim: Claim) -> Row:
    """A claim with our figures and the verdict."""
    figures = figures_of(claim)
    good = "s" in figures and claim["kind"] != OWN and reached(claim, figures["s"])
    return {**claim, "figures": figures, "reached": good, "defended": good and defended(claim)}


def reached(claim: Claim, figure: float) -> bool:
    """Whether a figure is what the claim asks for."""
    return bool(claim.get("at_least", figure) <= figure <= claim.get("at_most", figure))


def defended(claim: Claim) -> bool:
    """Whether a figure that reaches the claim would stand before a sceptic."""
    base, ours = claim.get("rates", (1, 1))
    fair = base >= ours and claim.get("seeds", 0) >= 3
    return (claim["kind"] in ("exact", "computed") or fair) and not claim.get("contradicted")


def figure_text(figure: float, unit: str) -> str:
    """A figure as a reader takes it in."""
    if unit == "share":
        return f"{100 * figure:+.{0 if abs(figure) >= 0.1 else 1 if abs(figure) >= 0.01 else 2}f} %"
    if unit == "x":
        return f"{figure:.{1 if figure >= 10 else 2}f}x"
    if unit == "BLEU":
        return f"{figure:+.1f} BLEU"
    return f"{figure:.3g} {unit}".strip()


def texts(claim: Claim, row: Row) -> dict[str, str]:
    """What stands in the columns of ours; figures in their places."""
    marks = claim.get("not_kept", "")
    shown = {
        name: figure_text(figure, claim["figures"][name][1]) + "†" * (name in marks)
        for name, figure in row["figures"].items()
    }
    ours = claim.get("samples", "{s}" if shown else "not tried")
    if claim["kind"] == "computed":
        ours += " computed"
    return {
        "ours": ours.format(**shown),
        "quality": claim.get("quality", "").format(**shown),
        "against": claim["against"].format(**shown),
    }


def settings(claim: Claim) -> str:
    """How many settings each side chose from, and of how many seeds a figure is the mean."""
    seeds, rates = claim.get("seeds", 0), claim.get("rates", ())
    words = [" / ".join(map(str, rates)), f"{seeds} seed{'s' * (seeds > 1)}" * bool(seeds)]
    return ", ".join(filter(None, words)) or claim["kind"].replace("own", "computed")


def table(article: str, rows: Sequence[Row]) -> Iterator[str]:
    """The table of an article."""
    own = article == OWN
    columns = ["", "what", "the article; asked of us", "ours at equal samples", "ours at equal quality", "reached"]
    columns[2:] = ["ours"] if own else columns[2:]
    columns += ["settings: base line / ours", "what speaks against it, and for it", "record"]
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for claim, row in zip(CLAIMS, rows, strict=True):
        if claim["article"] == article:
            shown = texts(claim, row)
            verdict = "**defended**" if row["defended"] else "yes" if row["reached"] else "no"
            link = f"[{row['record'].split('_', 1)[1].replace('_', ' ')}](../../records/{row['record']}/README.md)"
            why = "; ".join(filter(None, (claim.get("why", ""), shown["against"])))
            if own:
                cells = [claim["says"], shown["ours"], settings(claim)]
            else:
                verdict = "" if claim["kind"] == "untried" else verdict
                asks = "; ".join(dict.fromkeys([claim["theirs"], claim.get("asks", claim["theirs"])]))
                cells = [claim["says"], asks, shown["ours"], shown["quality"], verdict, settings(claim)]
            yield f"| {' | '.join([claim['key'], *cells, why, link])} |"


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """Of the articles' rows."""
    of = [row for row in rows if row["kind"] != OWN]
    tried = [row for row in of if row["kind"] != "untried"]
    return {"rows": len(of), "of": len(tried), **{key: sum(row[key] for row in of) for key in ("reached", "defended")}}


def page(rows: Sequence[Row]) -> str:
    """The page of the documentation."""
    words = counts(rows) | {"gone": counts(rows)["rows"] - counts(rows)["of"]}
    model = {"step": STEP_S, "size": PARAMETERS / 1e6, "spread": 100 * SPREAD}
    lines = [Path(__file__).with_name("claims.md").read_text(encoding="utf-8").format(**words, **model)]
    for article, title in ARTICLES.items():
        lines += [f"## {title}", "", *table(article, rows), ""]
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"make {PAGE.name}")
    args = _quick.parse(parser)
    rows = [row_of(claim) for claim in CLAIMS]
    for claim, row in zip(CLAIMS, rows, strict=True):
        verdict = "defended" if row["defended"] else "reached" if row["reached"] else "-"
        print(f"{row['key']:4} {verdict:9}{texts(claim, row)['ours']:32}{row['says']}")
    if args.write:
        PAGE.write_text(page(rows), encoding="utf-8")
    print(json.dumps({**counts(rows), "claims": rows}))


if __name__ == "__main__":
    main()
