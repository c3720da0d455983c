"""torchpact demo --text: a pretrained encoder of sentences gives words as many layers as they need."""

import json
import re
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import torchpact as tp
from torchpact.checks import check_count, check_number
from torchpact_recipes import demo_text as making
from torchpact_recipes.commands.common import Interrupted
from torchpact_recipes.commands.report import made_by
from torchpact_recipes.data.reviews import load_reviews
from torchpact_recipes.demo_text import Quality, Step, Times, Word
from torchpact_recipes.pretrained import minilm
from torchpact_recipes.report.text import Shown, write_text_page

UPDATES, TAU = 320, 3.0
HELD_OUT, TIMED = 200, 32
SENTENCES = (
    "The film is too long, and the ending is easy to guess.",
    "A warm, funny and quietly moving story about two brothers who have not spoken for years.",
    "Nobody in the cast seems to know whether this is a comedy or a thriller.",
    "What begins as a routine heist turns into a careful study of loyalty and guilt.",
    "I laughed twice.",
    "The photography is beautiful, the dialogue is not, and after an hour I stopped caring who had done it.",
)
"""What is shown: written for this page, so that nobody's review is. Nothing is measured on them."""
ROOM = 2
"""Characters of a legend's field beside its number."""
RAMP = ("#1c1b1a", "#f6d9c9", "#f4bda0", "#efa279", "#e88552", "#db6530", "#c2410c")
"""Ink, then shades from few layers to all."""


def demo_text(output: Path, iterations: int | None, tau: float | None, seed: int, as_json: bool) -> None:
    """Make MiniLM adaptive for each token, and show which words get how many layers."""
    updates = check_count("iterations", UPDATES if iterations is None else iterations)
    tau = check_number("tau", TAU if tau is None else tau, 0, open_high=True)
    console, started = Console(stderr=True), time.monotonic()

    def progress(description: str, _done: int, _total: int | None) -> None:
        console.print(description, markup=False, highlight=False)

    with console.status("fetching"):
        (teacher, tokenizer), reviews = minilm(progress=progress), load_reviews(progress=progress)
    order = torch.randperm(len(reviews), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out, others = [reviews[i] for i in order[:HELD_OUT]], [reviews[i] for i in order[HELD_OUT:]]
    console.print(
        f"MiniLM-L6 becomes adaptive for each token: {updates} updates on {making.BATCH} of {len(others):,} "
        f"sentences of film reviews each, without labels, then {len(held_out)} others to see what it saves. "
        f"{UPDATES} take about two minutes on 2 idle cores.",
        soft_wrap=True,
        highlight=False,
    )
    ada = making.adapt(teacher)
    _train(ada, teacher, tokenizer, others, updates, tau, seed, console)
    with console.status("comparing"):
        quality = making.compare(ada, teacher, tokenizer, held_out)
        found = making.words(ada, tokenizer, held_out)
        shown = making.words(ada, tokenizer, SENTENCES)
    with console.status("deploying and measuring times"):
        fast = tp.deploy(ada, making.encode(tokenizer, held_out[:TIMED]))
        times = making.time_them(fast, teacher, tokenizer, held_out[:TIMED])
    layers = len(ada.torchpact.runs[0].heads) + 1
    what = (
        f"Trained for {updates} updates to give the embeddings of the original, τ = {tau:g}; sentences of "
        "film reviews (Rotten Tomatoes, in the package vaderSentiment), measured on others. The texts below "
        "were written for this page."
    )
    page = write_text_page(output / "text.html", _page(shown, found, quality, times, layers, what))
    tp.save_pretrained(ada, output / "minilm")
    seconds = time.monotonic() - started
    if as_json:
        print(
            json.dumps(
                {
                    "updates": updates,
                    "tau": tau,
                    "seed": seed,
                    "quality": quality._asdict(),
                    "times": times._asdict(),
                    "words": [[list(word) for word in text] for text in shown],
                    "seconds": seconds,
                    "files": [str(page), str(output / "minilm")],
                },
                indent=2,
            )
        )
        return
    _show(Console(), shown, quality, times, layers)
    where, network = escape(str(page)), escape(str(output / "minilm"))
    Console().print(
        f"In {seconds:.0f} s. Open [bold]{where}[/bold]; the network is in {network}.", soft_wrap=True
    )


def _train(
    ada: Any,
    teacher: Any,
    tokenizer: Any,
    texts: Sequence[str],
    updates: int,
    tau: float,
    seed: int,
    console: Console,
) -> None:
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.fields[shown]}"), TimeRemainingColumn())
    done = 0
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=updates, shown="")

        def report(step: Step) -> None:
            nonlocal done
            done = step.done
            shown = f"{step.layers:.2f} layers a token, cosine {step.cosine:.3f}"
            bar.update(task, completed=done, shown=shown)
            if not console.is_terminal and 10 * done // updates > 10 * (done - 1) // updates:
                console.print(f"training, update {done} of {updates}: {shown}", highlight=False)

        try:
            making.train(ada, teacher, tokenizer, texts, updates=updates, tau=tau, seed=seed, report=report)
        except KeyboardInterrupt:
            message = f"stopped near update {done} of {updates}; a demo keeps nothing before its end"
            raise Interrupted(message, signal.SIGINT) from None


def _page(
    shown: list[list[Word]],
    found: list[list[Word]],
    quality: Quality,
    times: Times,
    layers: int,
    what: str,
) -> Shown:
    by_word: dict[str, list[int]] = defaultdict(list)
    counts = torch.zeros(layers)
    for word in (word for text in found for word in text if word.layers):
        counts[word.layers - 1] += 1
        name = word.text.strip().lower()
        if re.search(r"\w", name):
            by_word[name].append(word.layers)
    often = [(name, sum(each) / len(each), len(each)) for name, each in by_word.items() if len(each) >= 5]
    share = quality.flops / quality.full
    tiles = [
        (f"{share:.0%}", "of the FLOPs"),
        (f"{quality.cosine:.3f}", f"cosine to the original's embedding ({quality.worst:.3f} at worst)"),
        (f"{quality.layers:.2f}", f"of {layers} layers a token"),
        (f"{times.original / times.deployed:.2f} ×", f"as fast: {_milliseconds(times)}, {_timed(times)}"),
    ]
    return Shown(
        title="MiniLM gives words the layers they need",
        lead=what,
        tiles=tiles,
        texts=shown,
        layers=layers,
        shares=(counts / counts.sum().clamp(min=1)).tolist(),
        most=sorted(often, key=lambda row: (-row[1], -row[2], row[0]))[:12],
        least=sorted(often, key=lambda row: (row[1], -row[2], row[0]))[:12],
        footer=made_by("By torchpact demo --text."),
    )


def _milliseconds(times: Times) -> str:
    full = f"{times.full:.1f} if all tokens took all layers"
    return f"{times.original:.1f} ms before, {times.deployed:.1f} deployed ({full})"


def _timed(times: Times) -> str:
    others = ", while other programs ran" if times.contended else ""
    threads = torch.get_num_threads()
    cores = f"{threads} CPU core{'' if threads == 1 else 's'}"
    return f"for {times.texts} texts of up to {times.tokens} tokens on {cores}{others}"


def shaded(words: Sequence[Word], layers: int) -> Text:
    """Return words on shades by the layers that they took, with their number below the line.

    >>> shaded([Word("a ", 1), Word("film", 6)], 6).plain
    'a₁ film₆'
    """
    text = Text()
    for word, taken in words:
        body = word.rstrip()
        if not taken:
            text.append(body, "dim")
        else:
            number = "".join(chr(0x2080 + int(digit)) for digit in str(taken))
            text.append(f"{body}{number}", style_of(taken, layers))
        text.append(word[len(body) :])
    return text


def style_of(taken: int, layers: int) -> str:
    """Return the style of a number of layers: a shade, and ink that can be read on it."""
    shades = RAMP[1:]
    shade = shades[round((taken - 1) / max(layers - 1, 1) * (len(shades) - 1))]
    return f"{RAMP[0]} on {shade}"


def _show(
    console: Console, texts: Sequence[Sequence[Word]], quality: Quality, times: Times, layers: int
) -> None:
    legend = Text("layers ")
    for number in range(1, layers + 1):
        legend.append(f"{number:^{ROOM + len(str(number))}}", style_of(number, layers))
    console.print(legend)
    for words in texts:
        console.print()
        console.print(shaded(words, layers))
    table = Table(caption=f"{HELD_OUT} held-out sentences; times {_timed(times)}")
    for name in ("network", "layers a token", "MFLOPs a text", "cosine", "ms"):
        table.add_column(name, justify="left" if name == "network" else "right")
    table.add_row("original", f"{layers}", f"{quality.full / 1e6:.0f}", "1", f"{times.original:.1f}")
    times_faster = f"{times.full:.1f} ({times.original / times.full:.2f} ×)"
    table.add_row("deployed, all layers", f"{layers}", f"{quality.full / 1e6:.0f}", "", times_faster)
    table.add_row(
        "deployed",
        f"{quality.layers:.2f}",
        f"{quality.flops / 1e6:.0f} ({quality.flops / quality.full:.0%})",
        f"{quality.cosine:.3f}",
        f"{times.deployed:.1f} ({times.original / times.deployed:.2f} ×)",
    )
    console.print()
    console.print(table)
