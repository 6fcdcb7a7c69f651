"""Measures are data: what a problem declares is recorded, reported, compared and chosen by."""

import json
import re
from collections.abc import Sequence
from doctest import DocTestFinder, DocTestRunner
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie import Measure, UsageError, measures
from coterie.experiment.compare import Case, chosen_measure, summarise
from coterie.experiment.config import load
from coterie.experiment.tune import Trial, _best
from coterie.problems.tasks import personal
from coterie.report import compared
from coterie.report.charts import AXES
from coterie.report.page import content
from coterie.report.results import read

SOURCE = Path(coterie.__file__).parent


def shards(count: int = 3, classes: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(12, 4, generator=generator) for _ in range(count)]
    return [(part, part[:, :classes].argmax(1)) for part in x]


def recall(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.argmax(1)[labels == 1] == 1).double().mean()


RECALL = Measure("recall", "recall of class 1", "higher", "share", of=recall)


def problem(**more: Any) -> coterie.Weighting:
    data, net = shards(), nn.Linear(4, 3)
    nn.init.zeros_(net.bias)
    nn.init.eye_(net.weight)
    given = {"target": data[0], "test": data[1], "model": net, "loss": "cross_entropy", **more}
    return coterie.Weighting.on(data, **given)


@pytest.mark.parametrize("documented", [Measure, measures.declared, personal.over_clients], ids=lambda d: d.__name__)
def test_examples_run(documented: Any) -> None:
    names = {**vars(measures), **vars(personal)}
    (found,) = DocTestFinder(recurse=False).find(documented, documented.__name__, globs=names)
    assert found.examples
    assert DocTestRunner().run(found).failed == 0


def test_an_own_measure_is_recorded_on_the_rows_it_names_and_comes_first() -> None:
    own = (RECALL, Measure("spread", rows="validation", of=lambda outputs, labels: outputs.std()))
    made = problem(measures=own)
    fit = coterie.fit(made, coterie.methods.fedavg(), rounds=2)
    assert [entry["name"] for entry in fit.summary["measures"]][:3] == ["recall", "spread", "test_accuracy"]
    with torch.no_grad():
        x, y = shards()[1]
        assert fit.history[-1]["recall"] == pytest.approx(float(recall(fit.model(x), y)), abs=1e-6)
        x, _ = shards()[0]
        assert fit.history[-1]["spread"] == pytest.approx(float(fit.model(x).std()), abs=1e-6)


def test_reports_show_what_is_declared_against_every_axis(tmp_path: Path) -> None:
    fit = coterie.fit(problem(measures=[RECALL]), coterie.methods.fedavg(), rounds=2)
    run = read(fit.save(tmp_path / "own"))
    page, charts = content([run])
    assert {f"recall-{words}" for words in AXES.values()} <= {chart.name for chart in charts}
    assert re.search(r"fedavg reaches \d+\.\d % recall of class 1 after 2 rounds", page)
    by_name = {chart.name: chart for chart in charts}
    assert by_name["recall-exchanges"].values["at"] == [0.0, 1.0, 2.0]
    assert by_name["recall-bytes"].values["at"][-1] > 0
    assert by_name["recall-seconds"].values["at"] == [line["seconds"] for line in fit.history]


def test_own_nested_problems_have_curves(tmp_path: Path) -> None:
    def loss(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return (batch.inputs @ y - batch.labels).square().mean() + (x.exp() * y.square()).sum()

    def error(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return (batch.inputs @ y - batch.labels).abs().mean()

    data = [(x, y.float()) for x, y in shards()]
    own = [Measure("error", unit="m", of=error)]
    made = coterie.Nested(loss, loss).on(data, data, x=torch.zeros(4), y=torch.zeros(4), measures=own)
    method = coterie.methods.fednest(outer_step=0.1, step=0.1, lipschitz=10.0, batch="all")
    fit = coterie.fit(made, method, rounds=2)
    at = [torch.as_tensor(fit.variables[name]) for name in ("x", "y")]
    expected = sum(float((x @ at[1] - y).abs().mean()) for x, y in data) / 3
    assert fit.history[-1]["error"] == pytest.approx(expected, abs=1e-6)
    names = {chart.name for chart in content([read(fit.save(tmp_path / "own"))])[1]}
    assert {"error-rounds", "outer_loss-rounds", "inner_loss-bytes"} <= names


@pytest.mark.parametrize(
    ("of", "complaint"),
    [
        (
            lambda outputs, labels: outputs,
            r"odd returned a Tensor of shape \(12, 3\), not a number; return one",
        ),
        (lambda outputs, labels: None, "measure odd returned a NoneType"),
        (lambda outputs, labels: "high", "measure odd returned a str"),
        (lambda outputs: 1.0, r"measure odd failed: TypeError.*called with 2 arguments \(Tensor, Tensor\)"),
    ],
)
def test_a_measure_without_a_number_is_refused_before_a_folder_is_touched(of: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        coterie.fit(problem(measures=[Measure("odd", of=of)]), coterie.methods.fedavg(), rounds=1)


def test_so_is_a_function_of_the_view() -> None:
    def loss(x: Tensor, batch: Any) -> Tensor:
        return (batch.inputs @ x - batch.labels).square().mean()

    made = coterie.SingleLevel(loss).on([(torch.ones(3, 2), torch.ones(3))] * 2, x=torch.zeros(2), measures=vars)
    with pytest.raises((UsageError, TypeError)):
        coterie.fit(made, coterie.methods.fedavg(step=0.1), rounds=1)
    made = coterie.SingleLevel(loss).on(
        [(torch.ones(3, 2), torch.ones(3))] * 2, x=torch.zeros(2), measures=lambda view: {"odd": view.model}
    )
    with pytest.raises(UsageError, match="measure odd returned a Tensor of shape"):
        coterie.fit(made, coterie.methods.fedavg(step=0.1), rounds=1)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([Measure("f1")], "is no measure to compute; give coterie.Measure"),
        ([RECALL, RECALL], "measure recall exists already"),
        ([Measure("test_loss", of=recall)], "measure test_loss exists already"),
        ([Measure("a", rows="train", of=recall)], "measure a needs train rows; this problem has test, validation"),
        (RECALL, "measures is a Measure; give a list"),
        ("recall", "measures is a str; give a list"),
    ],
)
def test_bad_declarations(given: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        problem(measures=given)
    with pytest.raises(UsageError, match=r"needs some rows; .* has none\. Give test=… or target=…"):
        problem(measures=[RECALL], test=None, target=None)


@pytest.mark.parametrize(
    "wrong",
    [{"name": "round"}, {"name": "a b"}, {"better": "up"}, {"scale": "%"}, {"rows": "all"}, {"of": 3}, {"label": 5}],
)
def test_a_measure_is_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="measure"):
        Measure(**{"name": "f1", **wrong})


def test_own_losses_keep_the_accuracy_where_labels_are_classes() -> None:
    own = nn.CrossEntropyLoss(reduction="none")
    named, mine = (
        coterie.fit(problem(loss=loss), coterie.methods.fedavg(), rounds=1) for loss in ("cross_entropy", own)
    )
    assert mine.history[0]["test_accuracy"] == named.history[0]["test_accuracy"]
    counts = [(x, y * 50) for x, y in shards()]  # whole numbers that are no classes of three outputs
    poisson = coterie.Weighting.on(
        counts, test=counts[0], model=nn.Linear(4, 3), loss=lambda out, y: (out.sum(1) - y).square()
    )
    fit = coterie.fit(poisson, coterie.methods.fedavg(step=1e-4), rounds=1)
    assert "test_accuracy" not in fit.history[0]
    assert "test_loss" in fit.history[0]


def test_quantiles_over_clients() -> None:
    values = torch.tensor([0.5, 0.9, 0.1, 0.8, 0.7, 0.6, 0.95, 0.99, 0.3, 0.2, 0.4], dtype=torch.float64)
    found = personal.over_clients("accuracy", values, worst_first=False)
    assert found["accuracy_tenth"] == pytest.approx(0.15)  # two of eleven
    assert found["accuracy_median"] == pytest.approx(0.6)
    one = personal.over_clients("accuracy", values[:1], worst_first=False)
    assert set(one.values()) == {0.5}


def summary(final: dict[str, Any], declared: Sequence[Measure] = ()) -> dict[str, Any]:
    own = [measure.as_dict() for measure in measures.declared(declared, final)]
    return {"outcome": "finished", "final": final, "measures": own}


def test_compare_by_any_declared_measure() -> None:
    runs = [summary({"f1": 0.3, "test_accuracy": 0.9}, [Measure("f1"), measures.named("test_accuracy")])] * 2
    assert chosen_measure(runs, None) == Measure("f1")
    assert chosen_measure(runs, "test_accuracy") == measures.named("test_accuracy")
    with pytest.raises(UsageError, match=r"unknown measure 'accuracy'; did you mean test_accuracy"):
        chosen_measure(runs, "accuracy")
    with pytest.raises(UsageError, match="not every run has a finite f1; compare by one that all have: test_accuracy"):
        chosen_measure([*runs, summary({"f1": None, "test_accuracy": 0.9})], "f1")
    found = chosen_measure([summary({"test_loss": 0.3, "objective": 1.0})], None)
    assert found is not None
    assert found.name == "objective"


def test_tune_by_a_measure_that_needs_no_test_rows_unless_asked() -> None:
    own = [Measure("f1", better="higher", rows="validation"), Measure("cost", rows="test")]
    trials = [
        Trial(i, {}, {"f1": f1, "cost": cost}, "finished") for i, (f1, cost) in enumerate([(0.2, 1.0), (0.9, 2.0)])
    ]
    assert _best(trials, own)[0].number == 1
    assert _best(trials, own, "cost")[0].number == 0
    with pytest.raises(UsageError, match="unknown measure 'f2'; did you mean f1"):
        _best(trials, own, "f2")
    with pytest.raises(UsageError, match="no validation measure"):
        _best(trials, own[1:])


def test_damaged_declarations_are_named(tmp_path: Path) -> None:
    folder = coterie.fit(problem(), coterie.methods.fedavg(), rounds=1).save(tmp_path / "a")
    stored = json.loads((folder / "summary.json").read_text())
    for wrong in ("text", [3], [{"name": "f1", "better": "up"}], [{"label": "no name"}]):
        (folder / "summary.json").write_text(json.dumps({**stored, "measures": wrong}))
        with pytest.raises(UsageError, match=r"summary\.json is damaged"):
            read(folder)


def test_only_declarations_name_measures() -> None:
    rooms = [path for room in ("report", "experiment", "cli") for path in (SOURCE / room).rglob("*.py")]
    for path in rooms:
        named = set(re.findall(r'"(\w+)"', path.read_text())) & set(measures.NAMED)
        allowed = {"validation_loss"} if path.name == "guard.py" else set()  # the measure of the guard
        allowed |= (
            {"effective_clients", "largest_weight", "friends_weight", "friends_spread"}
            if path.name != "compare.py"
            else set()
        )
        assert named <= allowed, path


def test_a_comparison_shows_the_measure_it_was_asked_for_first(tmp_path: Path) -> None:
    done = []
    for method in (coterie.methods.fedavg(step=0.1), coterie.methods.sgd_full(step=0.1)):
        fit = coterie.fit(problem(measures=[RECALL]), method, rounds=1)
        case = Case(method.name, 0, load(None, {}, {"run.method": "fedavg", "run.problem": "quadratic"}))
        fit.save(tmp_path / "runs" / case.name)
        done.append((case, fit.summary))
    result = {"methods": ["fedavg", "sgd-full"], "seeds": [0], **summarise(done, "test_loss")}
    page = compared.save(result, tmp_path).read_text()
    assert "has the best test loss" in page
    assert "| test loss |" in (tmp_path / "table.md").read_text()
    assert summarise(done)["measure"] == "recall"
    assert result["higher_is_better"] is False
