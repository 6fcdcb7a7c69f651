"""Jobs of NVIDIA FLARE: new."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.app import app

nvflare = typer.Typer(help="Jobs of your own on NVIDIA FLARE.", no_args_is_help=True)
app.add_typer(nvflare, name="nvflare")


@nvflare.callback()
def _group() -> None:
    """Jobs of your own on NVIDIA FLARE."""


@nvflare.command(epilog="Example: coterie nvflare new hospitals")
def new(folder: Annotated[Path, typer.Argument(help="A new folder.")]) -> None:
    """Write a FLARE job that runs as it is."""
    from coterie.engines.nvflare.project import new as write

    for path in write(folder):
        print(path)
    print(f"Run it here: python {folder / 'job.py'}")
