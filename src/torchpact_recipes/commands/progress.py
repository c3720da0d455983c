"""Training on a terminal: a bar for every network, one for all where there are many, and results as lines."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from torchpact_recipes.commands.common import Interrupted
from torchpact_recipes.training import TrainingRun, distributed, train_together
from torchpact_recipes.training.run_files import Event
from torchpact_recipes.training.stopping import Stopped

ROOM_FOR_BARS = 100
"""Columns of a terminal below which numbers have the place of bars."""
SHORT = {"images": "img", "characters": "char", "sequences": "seq"}


class TrainingProgress:
    """Bars on standard error; ``total`` is the number of iterations of all that will be trained, if known.

    ``goes_on`` says how to continue a run that was stopped before its end.

    They follow the learners' own count of iterations, several times a second and without waiting for a
    device; losses and results come as they are found. A context manager: within it, call :meth:`train` as
    often as there are networks to train.
    """

    def __init__(self, total: int | None = None, console: Console | None = None, goes_on: str = "") -> None:
        console = console or Console(stderr=True)
        bars = [BarColumn(bar_width=12)] if console.width >= ROOM_FOR_BARS else []
        self.bar = _Watching(
            TextColumn("{task.description}", markup=False),  # names of folders
            *bars,
            MofNCompleteColumn(),
            _Speed(),
            TimeRemainingColumn(),
            # on a narrow terminal it ends early, rather than on a second line or at the cost of the others
            TextColumn(
                "{task.fields[shown]}",
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
                markup=False,
            ),
            expand=True,
            console=console,
            disable=distributed.rank() > 0,
        )
        self.bar.look = self._follow
        self.goes_on = goes_on
        self.all = None if total is None else self.bar.add_task("all iterations", total=total, shown="")
        self._followed: list[tuple[TaskID, TrainingRun[Any]]] = []
        self._before = 0  # iterations of those that are not followed any more

    def __enter__(self) -> "TrainingProgress":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def train(self, trainers: Sequence[TrainingRun[Any]]) -> None:
        """Train several networks at once, and show it."""
        followed = []
        for trainer in trainers:
            task = self.bar.add_task(
                trainer.files.folder.name,
                total=trainer.config.iterations,
                completed=trainer.learner.iteration,
                shown="",
                pace=trainer.learner.pace,
            )
            trainer.report = self._reporter(task)
            followed.append((task, trainer))
        self._followed = followed
        try:
            train_together(trainers)
        except Stopped as stop:
            # Typer would end the program for a KeyboardInterrupt, and not say a word
            left = self.goes_on and any(not trainer.done for trainer in trainers)
            raise Interrupted(f"{stop}; {self.goes_on}" if left else str(stop), stop.number) from None
        finally:
            self._follow()
            self._followed = []
            self._before += sum(trainer.learner.iteration for trainer in trainers)
            if self.all is not None:
                for task, _ in followed:
                    self.bar.remove_task(task)

    def _follow(self) -> None:
        """Bring the bars to where the learners are."""
        reached = [(task, trainer.learner.iteration) for task, trainer in self._followed]
        for task, iteration in reached:
            self.bar.update(task, completed=iteration)
        if self.all is not None and reached:
            self.bar.update(self.all, completed=self._before + sum(iteration for _, iteration in reached))

    def _reporter(self, task: TaskID) -> Callable[[Event], None]:
        seen: dict[str, str] = {}

        def report(event: Event) -> None:
            seen.update(shown(event))
            found = [seen[key] for key in ("test", "loss", "steps") if key in seen]
            self.bar.update(task, shown="  ".join(found))

        return report


class _Watching(Progress):
    """Bars that look, whenever they are drawn, at what they are about."""

    look: Callable[[], None] = staticmethod(lambda: None)

    def get_renderables(self) -> Iterable[RenderableType]:
        self.look()
        yield from super().get_renderables()


class _Speed(ProgressColumn):
    """Images, or what else is read, per second, over the last half minute."""

    def render(self, task: Task) -> Text:
        if task.speed is None or "pace" not in task.fields:
            return Text("")
        what, count = task.fields["pace"]
        return Text(f"{task.speed * count:,.0f} {SHORT.get(what, what)}/s")


def shown(event: Event) -> dict[str, str]:
    """What a line has room for, by kind.

    >>> shown({"kind": "train", "loss": 0.314, "expected_steps": [2.0, 3.0, 1.5]})
    {'loss': 'loss 0.31', 'steps': 'steps 2.0 3.0 1.5'}
    >>> shown({"kind": "validate", "modes": {"relaxed": {"accuracy": 0.912, "flops": 8.5e7}}})
    {'test': 'test 91.2% 85 MFLOPs'}
    """
    if event["kind"] == "train":
        steps = " ".join(f"{s:.1f}" for s in event["expected_steps"])
        return {"loss": f"loss {event['loss']:.2f}"} | ({"steps": f"steps {steps}"} if steps else {})
    measured = next(iter(event["modes"].values()))
    parts = [f"test {measured['accuracy']:.1%}"]
    if "bits_per_character" in measured:
        parts = [f"test {measured['bits_per_character']:.3f} bits"]
    if "flops" in measured:
        parts.append(f"{measured['flops'] / 1e6:.0f} MFLOPs")
    return {"test": " ".join(parts)}


def result_lines(results: dict[str, Any]) -> str:
    """One line for every run and mode.

    >>> print(result_lines({"runs/a": {"act": {"accuracy": 0.75, "nll": 0.5, "steps": 2.0}}}))
    runs/a  act          accuracy 75.00%  steps 2.00
    """
    return "\n".join(
        f"{folder}  {mode:<11}  {result_text(measured)}"
        for folder, modes in results.items()
        for mode, measured in modes.items()
    )


def result_text(measured: dict[str, Any]) -> str:
    """What was measured in one mode, in a few words.

    >>> result_text({"accuracy": 0.5, "bits_per_character": 1.5, "steps": 2.0})
    'accuracy 50.00%  1.500 bits a character  steps 2.00'
    """
    parts = [f"accuracy {measured['accuracy']:.2%}"]
    if "bits_per_character" in measured:
        parts.append(f"{measured['bits_per_character']:.3f} bits a character")
    if "flops" in measured:
        parts.append(f"{measured['flops'] / 1e6:.1f} ± {measured['flops_std'] / 1e6:.1f} MFLOPs")
    steps = measured["steps"] if isinstance(measured["steps"], list) else [measured["steps"]]
    if steps:
        parts.append("steps " + " ".join(f"{s:.2f}" for s in steps))
    if "transfer" in measured:
        parts.append(f"transfer {measured['transfer']['accuracy']:.2%}")
    return "  ".join(parts)
