# SPDX-License-Identifier: Apache-2.0
"""A page for each recipe, made with the site: from its docstring, the output of `paceline explain`, and a record."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

from recipe_plots import draw
from sphinx.application import Sphinx

from paceline.cli.explain import numbers, sent
from paceline.rules.describe import choices
from paceline.rules.recipes import RECIPES, Recipe
from paceline.rules.recipes.asynchronous import ASYNCHRONOUS
from paceline.rules.recipes.auto import AUTO
from paceline.rules.recipes.blocks import BLOCKS
from paceline.rules.recipes.lockstep import LOCKSTEP

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "records" / "2026-11-22_recipes"
WORKERS = (4, 16, 64)
PARAMETERS = 25_000_000
FAMILIES = {
    "Synchronous: every step": LOCKSTEP,
    "Blocks: once in many steps": (*AUTO, *BLOCKS),
    "Asynchronous: each worker by itself": ASYNCHRONOUS,
}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def settings(recipe: Recipe) -> list[tuple[str, ...]]:
    """Name, default and meaning of each setting, the meaning from the docstring."""
    text = inspect.getdoc(recipe.function) or ""
    said = dict(re.findall(r"^    (\w+): (.*(?:\n        .*)*)", text.partition("Args:\n")[2], flags=re.MULTILINE))
    parameters = inspect.signature(recipe.function).parameters.values()
    missing = [p.name for p in parameters if p.name not in said]
    if missing:
        raise ValueError(f"the docstring of {recipe.name} does not explain {', '.join(missing)}")
    role = re.compile(r":\w+:`([^`]+)`")
    return [(f"`{p.name}`", f"`{p.default!r}`", role.sub(r"`\1`", " ".join(said[p.name].split()))) for p in parameters]


def source(recipe: Recipe) -> str:
    """The publication, with a link where arXiv has it."""
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", recipe.source)


def page(recipe: Recipe, results: dict[str, Any]) -> str:
    """The page's Markdown."""
    rule = recipe.build()
    by_workers = [dict(numbers(rule, n)) for n in WORKERS]
    rows = [(name, *(found[name] for found in by_workers)) for name in by_workers[0]]
    docstring = (inspect.getdoc(recipe.function) or "").partition("\n\n")[0]
    about = " ".join(docstring.split())
    return f"""# {recipe.name}

{about}

**When to take it.** {recipe.when} See [which rule, and when](../guide/rules.md).

```console
$ paceline run --workers 4 --rule {recipe.name} train.py
$ paceline explain {recipe.name} --workers 4
```

## Five choices

With 4 workers and default settings:

{table(("choice", "question", "here"), choices(rule, 4))}

## Equation

```text
{recipe.equation}
```

{source(recipe)}.

## Numbers

{table(("workers", *map(str, WORKERS)), rows)}

## Bytes

With 4 workers: {" ".join(f"{line}." for line in sent(rule, 4, PARAMETERS))}

## Settings

{table(("setting", "default", "meaning"), settings(recipe))}

## On one small task

{result(recipe.name, results)}
"""


def result(name: str, results: dict[str, Any]) -> str:
    """The plot, and its result in a sentence."""
    row = results["trainings"][name]
    alone = results["trainings"][row["optimizer"]]
    ours, one = (sum(found["held_out"]) / len(found["held_out"]) for found in (row, alone))
    used, rate, rate_of_one = row["optimizer"], row["lr"], alone["lr"]
    return f"""![loss of one worker and of four]({name}.svg)

Four virtual workers under `{row["rule"]}` with {used} at a rate of {rate:g} end at a held-out loss of {ours:.3f};
one worker with {used} at {rate_of_one:g}, and as many minibatches as all four together, at {one:.3f}. The task
is tiny and short, and says little about quality: [the record](../../records/2026-11-22_recipes/README.md)
describes it, and [the evidence](../evidence/rules.md) compares recipes on larger ones.
"""


def overview() -> str:
    """The tables of all recipes, by family."""
    parts = []
    for title, recipes in FAMILIES.items():
        rows = [(f"[`{r.name}`](../recipes/{r.name}.md)", r.summary, r.when) for r in recipes]
        parts.append(f"## {title}\n\n{table(('recipe', 'what it does', 'when to take it'), rows)}\n")
    return "\n".join(parts)


def write(path: Path, text: str) -> None:
    """Only what has changed, so that a second build reads nothing again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def write_pages(app: Sphinx) -> None:
    """All pages and pictures, into docs/recipes/, which git ignores."""
    folder = Path(app.srcdir) / "docs" / "recipes"
    folder.mkdir(exist_ok=True)
    results = json.loads((RECORD / "curves.json").read_text(encoding="utf-8"))
    write(folder / "_overview.md", overview())
    for recipe in RECIPES.values():
        write(folder / f"{recipe.name}.md", page(recipe, results))
        write(folder / f"{recipe.name}.svg", draw(recipe.name, results))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
