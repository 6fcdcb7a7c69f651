"""Models as ONNX with their preprocessing: onnxruntime predicts as `coterie predict` does.

Needs onnx and onnxruntime, which are not among the test extras: `pip install -c constraints.txt -e '.[onnx]'` first.
"""

import csv
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coterie.cli import main
from coterie.errors import UsageError
from coterie.experiment.onnx import export_onnx
from coterie.experiment.predict import predict
from coterie.problems.files.prepare import Numeric, Preparation, Worded
from coterie.problems.files.tables import Form
from coterie.problems.models import build
from coterie.storage import tensor_bytes, write_atomically, write_json

ABSENT = [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]
needs_onnx = pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}; pip install 'coterie[onnx]'")

NUMBERS = (
    Numeric("age", 40.0, 12.5, indicator=True),
    Numeric("label", 1e6, 3e5, indicator=False, fill=0.25, slopes=(0.5, 0.0, -0.25)),
    Numeric("dose", -0.01, 0.002, indicator=True, fill=-0.5, slopes=(0.0, 0.125, 0.0)),
)
WORDS = (Worded("city", ("Oslo", "Rome", "São Paulo"), missing=True), Worded("sex", ("f", "m"), missing=False))


def stored(folder: Path, model: str = "logistic", kind: Any = "classification") -> Preparation:
    """A model with random parameters and every kind of preprocessing."""
    columns = tuple(c.name for c in NUMBERS), tuple(c.name for c in WORDS)
    slopes = tuple(n._replace(slopes=n.slopes or (0.0, 0.0, 0.0)) for n in NUMBERS)
    classes = ("ill", "well", "=1+1") if kind == "classification" else ()
    prepared = Preparation(
        Form("y", kind, *columns), slopes, WORDS, classes, (5, 5, 5)[: len(classes)], 7.0, 3.0, ("99",)
    )
    net = build(model, prepared.shape, prepared.outputs, 0)
    architecture = {"name": model, "shape": list(prepared.shape), "outputs": prepared.outputs}
    write_json(folder / "preprocess.json", {**prepared.as_dict(), "model": architecture})
    generator = torch.Generator().manual_seed(1)
    state = {name: torch.randn(value.shape, generator=generator) for name, value in net.state_dict().items()}
    write_atomically(folder / "model.safetensors", tensor_bytes(state, {}))
    return prepared


def table(path: Path, n: int = 60) -> dict[str, np.ndarray]:
    """Rows with missing values, a code for no value and unknown words, as a file and as a runtime is fed."""
    rng = np.random.default_rng(0)
    numbers = {c.name: c.mean + c.deviation * rng.normal(size=n) for c in NUMBERS}
    for values in numbers.values():
        values[rng.random(n) < 0.2] = np.nan
    numbers["age"][:3] = 99.0
    words = {c.name: rng.choice([*c.words, "", "elsewhere"], n).astype(object) for c in WORDS}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*numbers, *words])
        for i in range(n):
            shown = ["" if np.isnan(v[i]) else repr(float(v[i])) for v in numbers.values()]
            writer.writerow([*shown, *(v[i] for v in words.values())])
    return {name: values[:, None] for name, values in (numbers | words).items()}


@needs_onnx
@pytest.mark.parametrize("model", ["logistic", "mlp"])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_runtime_predicts_as_coterie_does(model: str, kind: str, tmp_path: Path) -> None:
    from onnxruntime import InferenceSession

    prepared = stored(tmp_path, model, kind)
    feed = table(tmp_path / "new.csv")
    names = export_onnx(tmp_path, tmp_path / "model.onnx")
    session = InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    found = dict(zip(names["outputs"], session.run(None, feed), strict=True))
    expected = predict(tmp_path, tmp_path / "new.csv")
    assert names["inputs"] == [*(c.name for c in prepared.numeric), "city", "sex"] == list(feed)
    assert [one.type for one in session.get_inputs()] == ["tensor(double)"] * 3 + ["tensor(string)"] * 2
    if kind == "regression":
        assert names["outputs"] == ["value"]
        np.testing.assert_allclose(found["value"][:, 0], [float(row[1]) for row in expected.rows], rtol=1e-5)
        return
    assert names["outputs"] == ["predicted_label", "probabilities"]  # label is a column here
    assert found["predicted_label"].tolist() == [row[1] for row in expected.rows]
    shares = np.array([[float(p) for p in row[2:]] for row in expected.rows])
    np.testing.assert_allclose(found["probabilities"], shares, atol=1e-5)
    assert len(np.unique(found["predicted_label"])) > 1


@needs_onnx
def test_the_command_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path)
    monkeypatch.setattr(sys, "argv", ["coterie", "export", str(tmp_path), "--onnx", str(tmp_path / "new" / "m.onnx")])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert "inputs age, label, dose, city, sex; outputs predicted_label, probabilities." in capsys.readouterr().out
    assert (tmp_path / "new" / "m.onnx").is_file()


@needs_onnx
def test_what_cannot_be_exported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = stored(tmp_path)
    net = nn.Sequential(nn.Linear(*prepared.shape, 3), nn.LayerNorm(3))
    monkeypatch.setattr("coterie.experiment.onnx.load_model", lambda folder, best: (net, prepared))
    with pytest.raises(UsageError, match=r"not LayerNorm. Export the network itself by torch.onnx"):
        export_onnx(tmp_path, tmp_path / "m.onnx")
    pictures = prepared._replace(form=prepared.form._replace(image=(1, 8, 8)))
    monkeypatch.setattr("coterie.experiment.onnx.load_model", lambda folder, best: (net, pictures))
    with pytest.raises(UsageError, match="this one takes pictures"):
        export_onnx(tmp_path, tmp_path / "m.onnx")


def test_without_the_package_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UsageError, match=r"needs the package onnx; install it with: pip install 'coterie\[onnx\]'"):
        export_onnx(tmp_path, tmp_path / "m.onnx")


def test_nothing_to_write_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["coterie", "export", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "nothing to write" in capsys.readouterr().err
