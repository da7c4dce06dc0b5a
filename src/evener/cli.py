"""The command line: ``evener train``, ``evener run``, ``evener bench`` and ``evener devices``.

It reads options, shows progress and results, and decides nothing else. What a command needs is
imported inside of it, so that ``evener --help`` does not wait for it.

Exit codes: 0; 1 if ``train --verify`` finds what neither rounding nor random numbers explain; 2
for an option or a machine that will not do, with one line on stderr that says why; 130 after
Ctrl-C. A traceback means a fault in evener, or in PyTorch. ``evener run`` ends as the program ends
that it runs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from evener.errors import EvenerError
from evener.textbook.record import Settings

if TYPE_CHECKING:
    from evener.devices import Device
    from evener.textbook.fashion_mnist import FashionMNIST
    from evener.textbook.record import Run

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended

BatchSize = Annotated[int, typer.Option(help="Images in a batch, on all devices together.")]

# The base of typer's errors about options. It has no public name of its own, and is click's in
# older versions of typer and typer's own in newer ones.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class OneLineGroup(TyperGroup):
    """The commands, with each expected error as one line on stderr."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line and exit."""
        # Else typer prints errors itself, as a box of five lines.
        extra["standalone_mode"] = False
        try:
            code = super().main(*args, **extra)
            if callable(code):  # a program, to be run outside of what reads the command line
                code = code()
        except (EvenerError, _UsageError) as error:
            message = error.format_message() if hasattr(error, "format_message") else str(error)
            typer.echo(f"evener: {message}", err=True)
            sys.exit(2)
        sys.exit(code or 0)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("evener: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=OneLineGroup,
    help="One line, and a plain PyTorch loop trains on every device of the machine.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

# A paragraph is one line: where it is broken is up to the width of the terminal.
EPILOG = """\
The two runs of the tutorial, with its model and weights:

evener train --devices cpu:0 --batch-size 256 --lr 0.1 --epochs 10 --width 64 \
--init tutorial --momentum 0 --data full

evener train --no-compare --devices cpu:0,cpu:1 --batch-size 512 --lr 0.2 --epochs 10 --width 64 \
--init tutorial --momentum 0 --data full

The tutorial doubles batch and learning rate with the second device. With evener both stay as \
they are: the batch is that of all devices together.
"""


@app.command(epilog=EPILOG)
def train(
    *,
    devices: Annotated[
        str,
        typer.Option(help='Such as "auto", "cpu", "cpu:0,cpu:1", "cpu*4"; see evener devices.'),
    ] = "auto",
    epochs: Annotated[int, typer.Option(help="How often all images are seen.")] = Settings.epochs,
    batch_size: BatchSize = Settings.batch_size,
    lr: Annotated[float, typer.Option(help="Learning rate of SGD.")] = Settings.lr,
    momentum: Annotated[float, typer.Option(help="Momentum of SGD.")] = Settings.momentum,
    width: Annotated[
        int, typer.Option(help="Channels of the first stage; the tutorial has 64.")
    ] = Settings.width,
    init: Annotated[
        str, typer.Option(help="Initial weights: modern, or tutorial for normal(0, 0.01).")
    ] = Settings.init,
    data: Annotated[
        str, typer.Option(help="sample (in the package), full (60000 images), or a folder.")
    ] = "sample",
    limit: Annotated[
        int | None, typer.Option(help="Use only the first N training and N test images.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Decides initial weights and order of the images.")
    ] = Settings.seed,
    compare: Annotated[
        bool, typer.Option(help="Train on the first device alone before all together.")
    ] = True,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Do not train: check one step on all devices against one device."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.json and loss.png.", metavar="DIR")
    ] = None,
) -> None:
    """Train ResNet-18 on Fashion-MNIST: on the first device, then on all, and compare."""
    settings = Settings(epochs, batch_size, lr, momentum, width, init, seed)
    if verify and out is not None:
        raise typer.BadParameter("--verify does not train: leave it out", param_hint="--out")
    if out is not None:
        _check_out(out)

    import torch  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415

    import evener  # noqa: PLC0415
    from evener.textbook import comparison, fashion_mnist, main_job, progress  # noqa: PLC0415

    console = Console(highlight=False, markup=False)
    found = evener.devices(devices)
    with progress.download_bar(console) as on_bytes:
        loaded = fashion_mnist.load(data, on_bytes=on_bytes)
    if limit is not None:
        loaded = loaded.limited(limit)
    num_parameters = sum(p.numel() for p in main_job.build(settings).parameters())
    console.print(
        f"ResNet-18 of width {width} ({num_parameters} parameters); {len(loaded.train)} training"
        f" and {len(loaded.test)} test images; batch {batch_size}, lr {lr}, momentum {momentum}",
        soft_wrap=True,
    )
    if verify:
        raise typer.Exit(_verify(found, loaded, settings))
    runs: list[Run] = []
    if compare and len(found) == 1:
        console.print("one device: there is nothing to compare it with")
    for team in [found[:1], found] if compare and len(found) > 1 else [found]:
        console.print(f"running on: {', '.join(map(str, team))}", soft_wrap=True)
        with progress.training_bar(console, loaded, settings) as (on_step, on_epoch):
            runs.append(main_job.run(team, loaded, settings, on_step=on_step, on_epoch=on_epoch))
    console.print(comparison.table(runs))
    for note in comparison.notes(runs):
        console.print(note, soft_wrap=True)
    if out is not None:
        report = {
            "evener": _version(),
            "torch": torch.__version__,
            "data": {
                "source": loaded.source,
                "num_train": len(loaded.train),
                "num_test": len(loaded.test),
            },
            "num_parameters": num_parameters,
            "settings": asdict(settings),
            **comparison.as_json(runs),
        }
        (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        comparison.plot(runs, out / "loss.png")
        console.print(f"wrote {out / 'report.json'} and {out / 'loss.png'}", soft_wrap=True)


@app.command(name="bench")
def compare_speeds(
    *,
    devices: Annotated[
        str, typer.Option(help='Two or more, such as "cpu", "cpu:0,cpu:1", "cpu*4".')
    ] = "auto",
    slow: Annotated[
        str, typer.Option(help='Slow devices by busy neighbours: "cpu:1=0.5" to half its speed.')
    ] = "",
    batch_size: BatchSize = Settings.batch_size,
    width: Annotated[int, typer.Option(help="Channels of the first stage.")] = Settings.width,
    rounds: Annotated[int, typer.Option(help="How often each takes a turn.")] = 3,
    seconds: Annotated[float, typer.Option(help="How long a turn takes.")] = 1.0,
) -> None:
    """Train ResNet-18 on random images on each device alone and on all, in turns, and compare."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import Progress  # noqa: PLC0415

    import evener  # noqa: PLC0415
    from evener.neighbour import parse_slow  # noqa: PLC0415
    from evener.textbook import bench  # noqa: PLC0415

    console = Console(highlight=False, markup=False)
    slowed = parse_slow(slow) if slow else {}
    found = evener.devices(devices)
    console.print(f"comparing: {', '.join(map(str, found))}", soft_wrap=True)
    for label, speed in slowed.items():
        console.print(f"a neighbour leaves {label} {speed:g} of its speed")
    # Drawn between turns only: what is timed shares its cores with nobody.
    with Progress(
        console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("")

        def on_turn(who: str, num_done: int, num_turns: int) -> None:
            progress.update(bar, description=who, completed=num_done, total=num_turns)
            progress.refresh()

        settings = Settings(batch_size=batch_size, width=width)
        result = bench.measure(
            found, settings, slow=slowed, num_rounds=rounds, seconds=seconds, on_turn=on_turn
        )
    console.print(bench.table(result))
    for note in bench.notes(result):
        console.print(note, soft_wrap=True)


@app.command(name="run", context_settings={"allow_interspersed_args": False})
def run_program(
    *,
    program: Annotated[
        list[str],
        typer.Argument(help="A script or with -m a module, and its arguments.", metavar="SCRIPT"),
    ],
    devices: Annotated[
        str, typer.Option(help='Those of DataParallel: "auto", "cpu:0,cpu:1", "cpu*4" ...')
    ] = "auto",
    shares: Annotated[
        str, typer.Option(help="auto: by the devices' speed; even: as torch cuts batches.")
    ] = "auto",
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is the name of a module, as for python -m.")
    ] = False,
) -> Any:
    """Run a program that uses torch.nn.DataParallel, with evener's in its place."""
    from evener.program import Program  # noqa: PLC0415

    return Program(program, devices, shares, is_module=module)


@app.command(name="devices")
def list_devices(
    spec: Annotated[
        str, typer.Argument(help='Which: "auto", "all", "cpu", "cpu:0,cpu:1", "cpu*4", "cuda:0".')
    ] = "auto",
) -> None:
    """Show the devices of this machine that a spec means."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    import evener  # noqa: PLC0415

    table = Table("device", "cores", "memory", "name")
    for device in evener.devices(spec):
        cores = ", ".join(map(str, device.cores)) or "-"
        table.add_row(device.label, cores, f"{device.memory_bytes / 2**30:.1f} GiB", device.name)
    Console(highlight=False, markup=False).print(table)


def _verify(found: list[Device], data: FashionMNIST, settings: Settings) -> int:
    """Check the first step of the main job; print a table, and give the exit code."""
    import torch  # noqa: PLC0415

    import evener  # noqa: PLC0415
    from evener.textbook import main_job  # noqa: PLC0415

    shuffler = torch.Generator().manual_seed(settings.seed)
    home = torch.device("cpu")
    pictures, labels = next(main_job.batches(data.train, settings.batch_size, home, shuffler))
    criterion = torch.nn.CrossEntropyLoss()
    result = evener.verify(
        main_job.build(settings),
        pictures,
        loss=lambda outputs: criterion(outputs, labels),
        devices=found,
    )
    return 0 if result else 1


def _version() -> str | None:
    try:
        return importlib.metadata.version("evener")
    except importlib.metadata.PackageNotFoundError:  # run from its source, not installed
        return None


def _check_out(folder: Path) -> None:
    """Find out before the training, not after it, whether the results can be written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter(
            "loss.png needs matplotlib; install it with: pip install 'evener[plot]'",
            param_hint="--out",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot make {folder}: {error}", param_hint="--out") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"cannot write into {folder}", param_hint="--out")


if __name__ == "__main__":
    app()
