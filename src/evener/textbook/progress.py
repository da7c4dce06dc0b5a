"""Progress of the command line: bars in a terminal, a line an epoch everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

if TYPE_CHECKING:
    from rich.console import Console

    from evener.textbook.download import OnBytes
    from evener.textbook.fashion_mnist import FashionMNIST
    from evener.textbook.record import Epoch, Settings, Step

__all__ = ["download_bar", "training_bar"]


@contextmanager
def download_bar(console: Console) -> Iterator[OnBytes]:
    """Show the progress of a download, if there is one."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def on_bytes(name: str, num_bytes: int, total_bytes: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total_bytes)
            progress.update(tasks[name], completed=num_bytes)

        yield on_bytes


@contextmanager
def training_bar(
    console: Console, data: FashionMNIST, settings: Settings
) -> Iterator[tuple[Callable[[Step], None], Callable[[Epoch], None]]]:
    """Show a bar for each epoch in a terminal, and a line for each epoch everywhere."""
    columns = (
        TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
        BarColumn(),
        TextColumn(
            "loss {task.fields[loss]:.3f}  {task.fields[rate]:.0f} images/sec{task.fields[shares]}"
        ),
    )
    # Drawn by a thread that takes its time from the training: no more often than needed.
    with Progress(
        *columns,
        console=console,
        transient=True,
        refresh_per_second=4,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task(
            "",
            total=len(data.train),
            epoch=1,
            epochs=settings.epochs,
            loss=float("nan"),
            rate=0.0,
            shares="",
        )

        def on_step(step: Step) -> None:
            shares = f"  shares {' + '.join(map(str, step.shares))}" if step.shares else ""
            progress.update(
                bar,
                completed=step.num_images,
                loss=step.loss,
                rate=step.images_per_s,
                shares=shares,
            )

        def on_epoch(epoch: Epoch) -> None:
            console.print(
                f"epoch {epoch.number}: {epoch.train_s:.1f} sec, "
                f"{epoch.images_per_s:.0f} images/sec, test acc {epoch.test_accuracy:.2f}"
            )
            progress.update(bar, completed=0, epoch=min(epoch.number + 1, settings.epochs))

        yield on_step, on_epoch
