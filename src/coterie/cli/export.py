"""A trained model for use elsewhere: ONNX with its preprocessing, and a card."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.app import AllowCode, app
from coterie.errors import UsageError, clean


@app.command(epilog="Example: coterie export advice/model --onnx model.onnx")
def export(
    folder: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A result folder with preprocess.json.")],
    onnx: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the model and its preprocessing as one ONNX graph.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Export the model with the lowest validation loss, not the last one.")
    ] = False,
    allow_code: AllowCode = None,
) -> None:
    """Write a trained model for use elsewhere."""
    from coterie.experiment.onnx import export_onnx

    if onnx is None:
        raise UsageError("nothing to write; give --onnx FILE.")
    names = export_onnx(folder, onnx, best=best)
    print(f"{onnx}: inputs {', '.join(map(clean, names['inputs']))}; outputs {', '.join(names['outputs'])}.")
