# SPDX-License-Identifier: Apache-2.0
"""`paceline lightrnn`: train, judge and use a LightRNN.

torch loads for seconds, so that what needs it is imported inside the commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import out, refuse, refusing

app = typer.Typer(
    help="Language models over millions of words in megabytes (LightRNN).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a training.", show_default=False)]


@app.command("train")
def train(
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT...", help="Text files, .gz or not, or folders.")],
    folder: Annotated[Path, typer.Option("--out", help="Folder for the model, states to go on from, and the report.")],
    dimension: Annotated[int, typer.Option(help="Of the vectors and the hidden state.")] = 256,
    layers: Annotated[int, typer.Option(help="Of the recurrent network.")] = 1,
    cell: Annotated[str, typer.Option(help="lstm, gru or rnn.")] = "lstm",
    tied: Annotated[bool, typer.Option("--tied", help="Input and output vectors are the same.")] = False,
    dropout: Annotated[float, typer.Option(help="Share of numbers set to zero in training.")] = 0.0,
    output: Annotated[str, typer.Option(help="lightrnn, or to compare with it full or adaptive.")] = "lightrnn",
    table: Annotated[str, typer.Option(help="First table: random, frequency, or a file of vectors.")] = "random",
    rounds: Annotated[int, typer.Option(help="Rounds; between two of them words are allocated anew.")] = 3,
    short: Annotated[int, typer.Option(help="Short rounds before them, which find a table to begin with.")] = 3,
    share: Annotated[float, typer.Option(help="Part of the text that a short round reads.")] = 0.1,
    epochs: Annotated[int, typer.Option(help="Passes over the text in a round.")] = 1,
    batch: Annotated[int, typer.Option(help="Passages read side by side.")] = 20,
    window: Annotated[int, typer.Option(help="Words between two steps of the optimizer.")] = 35,
    windows: Annotated[int, typer.Option(help="Windows of a passage.")] = 20,
    optimizer: Annotated[str, typer.Option(help="adam or sgd.")] = "adam",
    rate: Annotated[float | None, typer.Option(help="Highest learning rate; by default the optimizer's own.")] = None,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = 1.0,
    costs: Annotated[
        str, typer.Option(help="Gathered in a pass of their own, in training, or words stay: pass, training, none.")
    ] = "pass",
    validation: Annotated[Path | None, typer.Option(help="Text to judge by; default: the last part of TEXT.")] = None,
    held_back: Annotated[float, typer.Option(help="Share of TEXT that this last part is.")] = 0.02,
    tokens: Annotated[str, typer.Option(help="unicode, or space for text that is cut into words.")] = "unicode",
    lower: Annotated[bool, typer.Option("--lower", help="Read the text in lower case.")] = False,
    vocabulary: Annotated[int | None, typer.Option(help="Most words of the vocabulary; default: all.")] = None,
    min_count: Annotated[int, typer.Option(help="Words that come less often are unknown.")] = 1,
    save_every: Annotated[int, typer.Option(help="Batches between two saved states.")] = 200,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    workers: Annotated[int, typer.Option(help="Workers on this host.")] = 1,
    rule: Annotated[str | None, typer.Option(help='Rule of the workers, such as "bmuf(period=16)".')] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of a single worker.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew, whatever state lies there.")] = False,
) -> None:
    """Train a language model on text, in rounds.

    Started again with the same options, it goes on where it was stopped. On several hosts start it as
    torchrun ... -m paceline lightrnn train ..., with a folder that all of them see.
    """
    with refusing():
        from paceline_lightrnn.commands import train as training
        from paceline_lightrnn.settings import Course, Settings, Shape, Source

        names = tuple(str(path) for path in texts)
        held = None if validation is None else str(validation)
        settings = Settings(
            Shape(dimension, layers, cell, tied, dropout, output, table),
            Course(
                rounds, short, share, epochs, batch, window, windows, optimizer, rate, clip, costs, save_every, seed
            ),
            Source(names, held, held_back, tokens, lower, vocabulary, min_count),
        )
        if training.is_worker():
            if training.is_first():
                training.begin(settings, folder, fresh)
            training.work(folder, settings)
            return
        if workers < 1:
            refuse(f"--workers must be at least 1, got {workers}")
        training.begin(settings, folder, fresh)
        if workers == 1:
            training.work(folder, settings, threads)
            return
        code = training.launch(folder, settings, workers, rule)
    raise typer.Exit(code)


@app.command("worker", hidden=True)
def worker(folder: Folder) -> None:
    """Be a worker of the training in a folder; `train --workers N` starts them."""
    with refusing():
        from paceline_lightrnn.commands import train as training
        from paceline_lightrnn.settings import Settings

        training.work(folder, Settings.load(folder / training.SETTINGS))


@app.command("reallocate")
def reallocate(
    folder: Folder,
    texts: Annotated[list[Path] | None, typer.Argument(metavar="[TEXT...]", help="Default: the training text.")] = None,
    costs: Annotated[Path | None, typer.Option("--from", help="Costs that were gathered already: a file.")] = None,
) -> None:
    """Allocate the words of a trained model anew, in place, if that lowers the cost."""
    if costs is not None and texts:
        refuse("--from gives costs that were gathered already, and TEXT is to gather them from: give one of them")
    with refusing():
        from paceline_lightrnn.commands import use
        from paceline_lightrnn.commands.progress import shown

        with shown() as show:
            found = use.allocate(folder, texts or [], costs, show)
    change = 100 * (found.after / found.before - 1) if found.before else 0.0
    out().print(
        f"cost {found.before:.6g} -> {found.after:.6g} ({change:+.2f} %), bound {found.lower_bound:.6g}, "
        f"{found.seconds:.1f} s ({found.method})",
        markup=False,
        soft_wrap=True,
    )


@app.command("evaluate")
def evaluate(
    folder: Folder,
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT...", help="Files, folders, or - for standard input.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Perplexity of a text under a trained model."""
    with refusing():
        from paceline_lightrnn.commands import use
        from paceline_lightrnn.commands.progress import shown

        with shown() as show:
            found = use.judge(folder, texts, show)
    if as_json:
        typer.echo(use.as_json(found))
        return
    words, share = found.score.words, 100 * found.unknown / found.score.words
    out().print(
        f"perplexity {found.score.perplexity:.2f} over {words:,} words ({share:.1f} % unknown), "
        f"{words / max(found.seconds, 1e-9):,.0f} words/s",
        soft_wrap=True,
    )
    if found.damaged:
        out().print(f"{found.damaged:,} wrong bytes of the text were replaced: it is no clean UTF-8")


@app.command("generate")
def generate(
    folder: Folder,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    words: Annotated[int, typer.Option(help="Words of each text.")] = 50,
    samples: Annotated[int, typer.Option(help="Texts.")] = 3,
    temperature: Annotated[float, typer.Option(help="Below 1: what is probable becomes more so.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Draw among so many most probable words only.")] = None,
    beam: Annotated[int | None, typer.Option(help="The most probable text that so wide a beam finds.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
) -> None:
    """Let a trained model make up text."""
    with refusing():
        from paceline_lightrnn.commands import use

        options = use.GenerateOptions(prompt, words, samples, temperature, top_k, beam, seed)
        found = use.generate_texts(folder, options)
    for number, text in enumerate(found):
        if number:
            typer.echo("-" * 40)
        typer.echo(f"{prompt} {text}" if prompt else text)


@app.command("report")
def report(folder: Folder) -> None:
    """Write the report of a training again: DIR/report/index.html."""
    with refusing():
        from paceline_lightrnn.commands.report import write_page

        page = write_page(folder)
    out().print(f"report: {page}", soft_wrap=True, markup=False)
