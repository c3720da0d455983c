"""Training as a person watches it: a bar for every network, and one for all where there are many."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from torchpact.commands.common import Interrupted
from torchpact.commands.results import result_text
from torchpact.training import TrainingLoop, distributed, train_together
from torchpact.training.run_files import Event
from torchpact.training.stopping import Stopped


class TrainingProgress:
    """Bars on standard error; ``total`` is the number of iterations of all that will be trained, if known.

    A context manager: within it, call :meth:`train` as often as there are networks to train.
    """

    def __init__(self, total: int | None = None) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            # on a narrow terminal it ends early, rather than on a second line or at the cost of the others
            TextColumn(
                "{task.fields[shown]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
            ),
            TimeRemainingColumn(),
            expand=True,
            console=Console(stderr=True),
            disable=distributed.rank() > 0,
        )
        self.all = None if total is None else self.bar.add_task("all runs", total=total, shown="")

    def __enter__(self) -> "TrainingProgress":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def train(self, trainers: Sequence[TrainingLoop[Any]]) -> None:
        """Train several networks at once, and show it."""
        tasks = []
        for trainer in trainers:
            begun = trainer.learner.iteration
            task = self.bar.add_task(
                trainer.files.folder.name, total=trainer.config.iterations, completed=begun, shown=""
            )
            tasks.append(task)
            if self.all is not None:
                self.bar.advance(self.all, begun)
            trainer.report = self._reporter(task, begun)
        try:
            train_together(trainers)
        except Stopped as stop:
            # Typer would end the program for a KeyboardInterrupt, and not say a word
            raise Interrupted(str(stop), stop.number) from None
        finally:
            if self.all is not None:
                for task in tasks:
                    self.bar.remove_task(task)

    def _reporter(self, task: TaskID, begun: int) -> Callable[[Event], None]:
        seen: dict[str, str] = {}
        reached = begun

        def report(event: Event) -> None:
            nonlocal reached
            seen.update(_shown(event))
            shown = ", ".join(seen[key] for key in ("train", "test", "speed") if key in seen)
            self.bar.update(task, completed=event["iteration"], shown=shown)
            if self.all is not None:
                self.bar.advance(self.all, event["iteration"] - reached)
            reached = event["iteration"]

        return report


def _shown(event: Event) -> dict[str, Any]:
    if event["kind"] == "train":
        steps = " ".join(f"{s:.2f}" for s in event["expected_steps"])
        what, rate = next((name, rate) for name, rate in event.items() if name.endswith("_per_second"))
        return {
            "train": f"loss {event['loss']:.3f}" + (f", steps {steps}" if steps else ""),
            "speed": f"{rate:.0f} {what.removesuffix('_per_second')}/s",
        }
    mode, measured = next(iter(event["modes"].items()))
    return {"test": f"{mode} {result_text(measured)}"}
