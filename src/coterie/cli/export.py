"""A trained model for use elsewhere: ONNX with its preprocessing, and a card."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.app import DECIDE, AllowCode, app
from coterie.errors import UsageError, clean


@app.command(rich_help_panel=DECIDE, epilog="Example: coterie export advice/model --onnx model.onnx")
def export(
    folder: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A result folder with preprocess.json.")],
    onnx: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the model and its preprocessing as one ONNX graph.")
    ] = None,
    card: Annotated[
        bool, typer.Option("--card", help="Write model-card.md and model-card.json beside the model.")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="Export the model with the lowest validation loss, not the last one.")
    ] = False,
    allow_code: AllowCode = None,
) -> None:
    """Write a trained model for use elsewhere."""
    from coterie.experiment.onnx import export_onnx
    from coterie.report.card import write_card

    if onnx is None and not card:
        raise UsageError("nothing to write; give --onnx FILE, --card, or both.")
    if onnx is not None:
        names = export_onnx(folder, onnx, best=best)
        print(f"{onnx}: inputs {', '.join(map(clean, names['inputs']))}; outputs {', '.join(names['outputs'])}.")
    if card:
        print(" and ".join(map(str, write_card(folder))))
