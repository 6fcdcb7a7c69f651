"""A stored model of tables as one ONNX graph, with its preprocessing: from columns as they stand to the prediction.

Inputs are the columns by name, [n, 1] each: numbers as float64 (NaN where missing), words as strings ("" where
missing). A column of dates is three inputs of numbers, as in preprocess.json. Outputs are `label` and `probabilities`,
or `value` where a number is predicted.
"""

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from coterie import __version__
from coterie.errors import UsageError, clean
from coterie.experiment.predict import load_model
from coterie.problems.files.prepare import Preparation
from coterie.problems.files.reading import Unreadable, extra
from coterie.problems.files.tables import MISSING
from coterie.storage import make_folder, write_atomically

OPSET, ML_OPSET, IR = 17, 3, 8  # what onnxruntime has read since 2022
ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "Relu", nn.Tanh: "Tanh", nn.Sigmoid: "Sigmoid"}
NOTHING = (nn.Flatten, nn.Identity, nn.Dropout)  # on rows of numbers, in use


def export_onnx(folder: Path, out: Path, *, best: bool = False) -> dict[str, list[str]]:
    """Write the model of a result folder as ONNX; the names of its inputs and outputs.

    Args:
        folder: a result folder with preprocess.json and model.safetensors.
        out: the file to write.
        best: take the model with the lowest validation loss, not the last one.
    """
    try:
        onnx = extra("onnx", "onnx", "ONNX export")
    except Unreadable as error:
        raise UsageError(f"{error}; install it with: pip install 'coterie[onnx]'.") from None
    net, prepared = load_model(folder, best=best)
    if not isinstance(net, nn.Module):
        raise UsageError(
            f"{folder} holds models of several kinds, which ONNX export does not cover; use coterie predict."
        )
    if prepared.form.image is not None:
        raise UsageError("ONNX export is for models of tables; this one takes pictures.")
    graph = _Graph(onnx, prepared)
    graph.model(net)
    made = graph.made()
    onnx.checker.check_model(made, full_check=True)
    make_folder(out.absolute().parent)
    try:
        write_atomically(out, made.SerializeToString())
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror or error}.") from None
    return {"inputs": [one.name for one in graph.inputs], "outputs": [one.name for one in graph.outputs]}


class _Graph:
    """A graph while it is made: its nodes, and the name of what the last one gives."""

    def __init__(self, onnx: Any, prepared: Preparation) -> None:
        self.onnx, self.prepared = onnx, prepared
        self.types = onnx.TensorProto
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.columns = {*(column.name for column in prepared.numeric), *(column.name for column in prepared.worded)}

    def made(self) -> Any:
        """The whole model, with what should be known of it."""
        helper, form = self.onnx.helper, self.prepared.form
        graph = helper.make_graph(self.nodes, "coterie", self.inputs, self.outputs, self.constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)]
        about = {"producer_name": "coterie", "producer_version": __version__, "ir_version": IR}
        model = helper.make_model(graph, opset_imports=opsets, **about)
        helper.set_model_props(model, {"label": clean(form.label), "kind": form.kind})
        return model

    def name(self, what: str) -> str:
        """A name that no column has."""
        name = f"{what}_{len(self.nodes) + len(self.constants)}"
        return name if name not in self.columns else self.name(f"{what}_")

    def node(self, kind: str, *inputs: str, domain: str = "", output: str | None = None, **settings: Any) -> str:
        """One more node; the name of what it gives."""
        name = output or self.name(kind.lower())
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), [name], domain=domain, **settings))
        return name

    def constant(self, value: Any) -> str:
        """An array as an input of nodes."""
        name = self.name("constant")
        self.constants.append(self.onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def cast(self, name: str, to: str) -> str:
        """The same as numbers of another type."""
        return self.node("Cast", name, to=getattr(self.types, to))

    def input(self, name: str, kind: str) -> str:
        """A column of the table."""
        self.inputs.append(self.onnx.helper.make_tensor_value_info(name, getattr(self.types, kind), ["rows", 1]))
        return name

    def output(self, name: str, kind: str, shape: list[Any]) -> str:
        """A result; a column of that name is told apart."""
        while name in self.columns:
            name = f"predicted_{name}"
        self.outputs.append(self.onnx.helper.make_tensor_value_info(name, getattr(self.types, kind), shape))
        return name

    def prepared_rows(self) -> str:
        """The model's inputs, as `Preparation.inputs` makes them."""
        parts = [*self._numbers(), *(part for j in range(len(self.prepared.worded)) for part in self._words(j))]
        return self.cast(self.node("Concat", *parts, axis=1) if len(parts) > 1 else parts[0], "FLOAT")

    def _numbers(self) -> list[str]:
        """Scaled numbers with what stands for missing ones, and the indicators."""
        columns = self.prepared.numeric
        if not columns:
            return []
        given = self.node("Concat", *(self.input(column.name, "DOUBLE") for column in columns), axis=1)
        absent = self.node("IsNaN", given)
        codes = {value for word in self.prepared.missing if (value := _number(word)) is not None}
        for code in sorted(codes):
            absent = self.node("Or", absent, self.node("Equal", given, self.constant(code)))
        mean, deviation = (np.array([getattr(column, key) for column in columns]) for key in ("mean", "deviation"))
        scaled = self.node("Div", self.node("Sub", given, self.constant(mean)), self.constant(deviation))
        scaled = self.node("Where", absent, self.constant(0.0), scaled)
        filled = self.constant(np.array([[column.fill for column in columns]]))
        if any(column.slopes for column in columns):
            slopes = self.constant(np.array([column.slopes for column in columns]).T.copy())
            filled = self.node("Add", filled, self.node("MatMul", scaled, slopes))
        parts = [self.node("Where", absent, filled, scaled)]
        indicated = [j for j, column in enumerate(columns) if column.indicator]
        if indicated:
            chosen = self.node("Gather", self.cast(absent, "DOUBLE"), self.constant(np.array(indicated)), axis=1)
            parts.append(chosen)
        return parts

    def _words(self, j: int) -> list[str]:
        """A column of words as 0 and 1 per category; −1 is missing, −2 a word that no training file had."""
        column = self.prepared.worded[j]
        missing = MISSING | frozenset(self.prepared.missing)
        keys = [*column.words, *sorted(missing - set(column.words))]
        codes = [*range(len(column.words)), *(-1 for _ in keys[len(column.words) :])]
        encoder: dict[str, Any] = {"keys_strings": keys, "values_int64s": codes, "default_int64": -2}
        code = self.node("LabelEncoder", self.input(column.name, "STRING"), domain="ai.onnx.ml", **encoder)
        known = np.array([[*range(len(column.words)), *([-1] if column.missing else [])]], dtype=np.int64)
        return [self.cast(self.node("Equal", code, self.constant(known)), "DOUBLE")] if known.size else []

    def model(self, net: nn.Module) -> None:
        """The network after the preparation, and the outputs."""
        last = self.prepared_rows()
        for layer in net if isinstance(net, nn.Sequential) else [net]:
            if isinstance(layer, nn.Linear):
                weight = self.constant(layer.weight.detach().cpu().float().numpy())
                bias = [] if layer.bias is None else [self.constant(layer.bias.detach().cpu().float().numpy())]
                last = self.node("Gemm", last, weight, *bias, transB=1)
            elif type(layer) in ACTIVATIONS:
                last = self.node(ACTIVATIONS[type(layer)], last)
            elif not isinstance(layer, NOTHING):
                raise UsageError(
                    f"ONNX export knows linear layers, {', '.join(ACTIVATIONS.values())} and dropout in a sequence, "
                    f"not {type(layer).__name__}. Export the network itself by torch.onnx; preprocess.json says how "
                    "rows become its inputs."
                )
        last = self.cast(last, "DOUBLE")
        if not self.prepared.classes:
            own = self.node("Mul", last, self.constant(self.prepared.label_deviation))
            value = self.output("value", "DOUBLE", ["rows", 1])
            self.node("Add", own, self.constant(self.prepared.label_mean), output=value)
            return
        best = self.node("ArgMax", last, axis=1, keepdims=0)
        classes = self.constant(np.array(self.prepared.classes, dtype=object))
        self.node("Gather", classes, best, output=self.output("label", "STRING", ["rows"]))
        shape = ["rows", len(self.prepared.classes)]
        self.node("Softmax", last, axis=1, output=self.output("probabilities", "DOUBLE", shape))


def _number(word: str) -> float | None:
    """The number that a word for no value is, if it is one."""
    try:
        value = float(word)
    except ValueError:
        return None
    return None if np.isnan(value) else value
