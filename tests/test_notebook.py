"""examples/advice.ipynb runs, cell after cell, and is stored without its results."""

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "advice.ipynb"


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (stored["nbformat"], stored["metadata"]["kernelspec"]["name"]) == (4, "python3")
    return [cell for cell in stored["cells"] if cell["cell_type"] == "code"]


def test_it_is_stored_without_results(cells: list[dict[str, Any]]) -> None:
    assert len(cells) > 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def test_its_cells_run_in_order(
    cells: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in cells:
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, NOTEBOOK.name, "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names))
    advice = next(value for value in shown if value is not None)
    assert advice._repr_html_().startswith("<iframe ")
    verdicts = {partner.name: partner.verdict for partner in advice.partners}
    assert verdicts["west"] == "left out"
    assert verdicts["north"] in ("helps", "nothing")
    assert names["model"].weights_["west"] < 0.1
    printed = capsys.readouterr().out
    assert "together 0." in printed
    assert os.listdir(tmp_path) == []
