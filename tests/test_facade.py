"""coterie from Python: the documented example, own data in every form, and errors that a user can act on."""

import json
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from doctest import DocTestFinder, DocTestRunner
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import coterie
from coterie.problems.base import Problem

Shard = tuple[Tensor, Tensor]


def shard(seed: int, *, flip: bool = False, rows: int = 30) -> Shard:
    """Two classes in the plane; a stranger has them the wrong way round."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, generator=draw)
    y = (x.sum(1) > 0).long()
    return x, 1 - y if flip else y


@pytest.fixture
def shards() -> list[Shard]:
    """Two friends, two strangers."""
    return [shard(1), shard(2), shard(3, flip=True), shard(4, flip=True)]


@pytest.fixture
def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(2, 2)


def made(shards: Any, net: Any, **more: Any) -> coterie.Weighting:
    settings = {"target": shard(9, rows=20), "loss": "cross_entropy", **more}
    return coterie.Weighting.on(shards, model=net, **settings)


def fitted(problem: Any, method: Any, rounds: int = 100, **more: Any) -> coterie.Fit:
    return coterie.fit(problem, method, rounds, **{"mode": "vmap", **more})


def bits(fit: coterie.Fit) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in fit.model.parameters())


def test_the_documented_example(shards: list[Shard], net: nn.Module, tmp_path: Path, capsys: Any) -> None:
    x_val, y_val = shard(9, rows=20)
    problem = coterie.Weighting.on(shards, target=(x_val, y_val), model=net, loss="cross_entropy")
    fit = coterie.fit(problem, coterie.methods.meritfed(step=0.5, mirror_step=1.0), rounds=40)
    assert fit.weights is not None
    assert fit.weights.shape == (4,)
    assert float(fit.weights[:2].sum()) > 0.9
    x, y = shard(10, rows=200)
    assert float((fit.model(x).argmax(1) == y).double().mean()) > 0.95
    assert [line["round"] for line in fit.history] == list(range(41))
    assert fit.history[-1]["validation_loss"] < fit.history[0]["validation_loss"]
    assert fit.ledger.total.rounds == 40
    assert fit.ledger.total.floats_up == 40 * 4 * 6
    fit.save(tmp_path / "mine")
    capsys.readouterr()
    fit.report()
    shown = capsys.readouterr().out
    assert "meritfed" in shown
    assert "validation accuracy" in shown


def test_the_model_is_not_changed_and_the_trained_one_is_ordinary(shards: list[Shard], net: nn.Module) -> None:
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    fit = fitted(made(shards, net), coterie.methods.fedavg(step=0.5), rounds=3)
    assert fit.weights is None
    assert type(fit.model) is nn.Linear
    for name, p in net.named_parameters():
        assert torch.equal(p, before[name])
        assert not torch.equal(dict(fit.model.named_parameters())[name], before[name])


class Rows(Dataset[Any]):
    """A data set that hands out rows, as torchvision's do: the label is an int."""

    def __init__(self, data: Shard) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> Any:
        if index >= len(self):
            raise IndexError(index)
        return self.data[0][index], int(self.data[1][index])


FORMS: dict[str, Callable[[Shard], Any]] = {
    "arrays": lambda s: (s[0].numpy(), s[1].numpy()),
    "lists": lambda s: (s[0].tolist(), s[1].tolist()),
    "TensorDataset": lambda s: TensorDataset(*s),
    "Dataset": Rows,
    "list of columns": list,
}


@pytest.mark.parametrize("form", FORMS)
def test_own_data_in_any_form_gives_the_same_bits(shards: list[Shard], net: nn.Module, form: str) -> None:
    method = coterie.methods.meritfed(step=0.5, batch=8)
    plain = fitted(made(shards, net), method, rounds=4)
    given = [FORMS[form](one) for one in shards]
    other = fitted(made(given, net, target=FORMS[form](shard(9, rows=20))), method, rounds=4)
    assert bits(plain) == bits(other)
    assert torch.equal(plain.weights, other.weights)
    lazy = fitted(made(iter(given), net), method, rounds=4)
    assert bits(plain) == bits(lazy)


def test_same_seed_same_bits(shards: list[Shard], net: nn.Module) -> None:
    problem, method = made(shards, net), coterie.methods.meritfed(step=0.5, batch=8)
    one, two, other = (fitted(problem, method, rounds=5, seed=seed, active=0.7) for seed in (3, 3, 4))
    assert bits(one) == bits(two)
    assert torch.equal(one.weights, two.weights)
    assert [{**a, "seconds": 0} for a in one.history] == [{**b, "seconds": 0} for b in two.history]
    assert one.ledger.as_dict() == two.ledger.as_dict()
    assert bits(one) != bits(other)


def test_all_fits_of_one_problem_run_in_one_mode(
    shards: list[Shard], net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mode measured anew for every fit would change last digits from fit to fit."""
    problem = made(shards, net)
    measured = iter(["sequential", "vmap"])
    monkeypatch.setattr("coterie.experiment.build.faster_mode", lambda *_: next(measured))
    chosen = [coterie.fit(problem, coterie.methods.fedavg(), rounds=1)._parts.config.federation for _ in range(2)]
    assert [options.mode for options in chosen] == ["sequential"] * 2
    assert [options.chunk for options in chosen] == [4] * 2
    other = coterie.fit(made(shards, net), coterie.methods.fedavg(), rounds=1)
    assert other._parts.config.federation.mode == "vmap"


def test_float64_and_the_settings_of_the_federation(shards: list[Shard], net: nn.Module) -> None:
    problem = made(shards, net, dtype="float64")
    fit = fitted(problem, coterie.methods.meritfed(mirror_steps=3), rounds=2, count=2, target_at=1)
    assert fit.weights.dtype == torch.float64
    assert next(fit.model.parameters()).dtype == torch.float64
    causes = {cause.rpartition("/")[2]: entry for cause, entry in fit.ledger.by_cause.items()}
    assert causes["gradient"].floats_up == 2 * 2 * 6  # rounds × active × parameters
    assert causes["gradient"].bytes_up == 8 * 2 * 2 * 6
    assert causes["goal-gradient"].rounds == 2 * 3  # a target among the clients is asked over the wire


def named(**options: Any) -> Problem:
    quadratic = coterie.problem("quadratic", clients=3, **options)
    return coterie.fit(quadratic, coterie.methods.fedavg(), rounds=1)._parts.problem


def nested(kind: str, **options: Any) -> Problem:
    data, start = [(torch.ones(4, 2), torch.ones(4))] * 2, torch.ones(2)
    if kind == "bilevel":
        problem = coterie.Nested(lambda x, y, b: (y - x).square().sum(), lambda x, y, b: y.square().sum())
        return problem.on(data, x=start, y=start, **options)
    if kind == "minimax":
        return coterie.Minimax(lambda x, y, b: (x * y - y * y).sum()).on(data, x=start, y=start, **options)
    if kind == "compositional":
        return coterie.Compositional(lambda x, b: x, lambda y, b: y.square().sum()).on(data, x=start, **options)
    return coterie.SingleLevel(lambda x, b: x.square().sum()).on(data, x=start, **options)


@pytest.mark.parametrize("where", ["weighting", "named", "bilevel", "minimax", "compositional", "single-level"])
def test_numbers_and_devices_are_taken_by_name_and_as_torchs(shards: list[Shard], net: nn.Module, where: str) -> None:
    makers = {"weighting": partial(made, shards, net), "named": named}
    make = makers.get(where, partial(nested, where))
    for kind in (torch.float32, torch.float64):
        for dtype in (kind, str(kind).removeprefix("torch.")):
            for device in ("cpu", torch.device("cpu")):
                assert make(dtype=dtype, device=device).start.dtype == kind
    with pytest.raises(coterie.UsageError, match=r"dtype is torch\.float16; it must be 'float32' or 'float64'"):
        make(dtype=torch.float16)
    with pytest.raises(coterie.UsageError, match=r"dtype is 'wide'; it must be 'float32' or 'float64'"):
        make(dtype="wide")


def test_a_loss_of_ones_own(shards: list[Shard], net: nn.Module) -> None:
    def by_row(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels, reduction="none")

    method = coterie.methods.fedavg(step=0.5)
    own = fitted(made(shards, net, loss=by_row), method, rounds=3)
    named = fitted(made(shards, net), method, rounds=3)
    for one, two in zip(own.model.parameters(), named.model.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    assert "validation_loss" in own.history[-1]


def test_a_test_set_is_measured_and_l2_pulls_to_zero(shards: list[Shard], net: nn.Module) -> None:
    method = coterie.methods.fedavg(step=0.1)
    fit = fitted(made(shards, net, test=shard(20)), method, rounds=2)
    assert 0.0 <= fit.history[-1]["test_accuracy"] <= 1.0
    pulled = fitted(made(shards, net, l2=5.0), method, rounds=20)
    assert sum(float(p.detach().square().sum()) for p in pulled.model.parameters()) < 0.05


CONTRACT = (
    "config.toml",
    "metrics.jsonl",
    "weights.csv",
    "ledger.json",
    "events.jsonl",
    "model-best.safetensors",
    "model.safetensors",
    "summary.json",
)


def test_save_writes_the_contracts_files(shards: list[Shard], net: nn.Module, tmp_path: Path) -> None:
    fit = fitted(made(shards, net), coterie.methods.meritfed(step=0.5), rounds=4, record=2, norm=1.0)
    folder = fit.save(tmp_path / "mine")
    assert sorted(path.name for path in folder.iterdir()) == sorted(CONTRACT)
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] == fit.history
    rows = [row.split(",") for row in (folder / "weights.csv").read_text().splitlines()]
    assert rows[0] == ["round", "client_0", "client_1", "client_2", "client_3"]
    assert [row[0] for row in rows[1:]] == ["0", "2", "4"]
    assert [float(w) for w in rows[-1][1:]] == pytest.approx(fit.weights.tolist(), abs=1e-8)
    assert json.loads((folder / "ledger.json").read_text()) == fit.ledger.as_dict()
    assert json.loads((folder / "summary.json").read_text()) == fit.summary
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(tensor, fit.model.state_dict()[name])
    with pytest.raises(coterie.UsageError, match="is not empty"):
        fit.save(folder)
    fit.save(folder, force=True)


def test_events_are_kept_and_saved(shards: list[Shard], net: nn.Module, tmp_path: Path) -> None:
    fit = fitted(made(shards, net), coterie.methods.meritfed(), rounds=2, norm=1e-6)
    events = [json.loads(line) for line in (fit.save(tmp_path / "e") / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == (["rejected"] * 4 + ["skipped"]) * 2


def test_a_diverged_fit_is_a_value(shards: list[Shard], net: nn.Module) -> None:
    deep = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    data = [(x, x.sum(1, keepdim=True)) for x, _ in shards]
    problem = made(data, deep, target=data[0], loss="squared")
    fit = fitted(problem, coterie.methods.fedavg(step=1e4), rounds=50)
    assert fit.summary["outcome"] == "diverged"
    assert "Lower method.step (now 10000)" in fit.summary["message"]
    assert all(bool(torch.isfinite(p).all()) for p in fit.model.parameters())
    json.loads(json.dumps(fit.history), parse_constant=pytest.fail)


def test_they_are_small_to_look_at_and_cannot_be_changed(shards: list[Shard], net: nn.Module) -> None:
    problem = made(shards, net)
    fit = fitted(problem, coterie.methods.fedavg(), rounds=1)
    assert len(repr(problem)) < 100
    assert len(repr(fit)) < 100
    with pytest.raises(FrozenInstanceError):
        problem.test = None  # type: ignore[misc]


def nans() -> Shard:
    x, y = shard(5)
    x[7, 1] = float("nan")
    return x, y


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"shards": []}, "there is no client"),
        ({"shards": 5}, "shards is a int; give one shard per client"),
        ({"shards": [shard(1), (torch.zeros(0, 2), torch.zeros(0).long())]}, "client 1 is empty; leave it out"),
        ({"shards": [shard(1), TensorDataset(torch.zeros(0, 2), torch.zeros(0))]}, "client 1 is empty; leave it out"),
        ({"shards": [shard(1), nans()]}, r"client 1 holds NaN or infinity \(first in row 7\); drop or impute"),
        ({"target": nans()}, r"target.* holds NaN or infinity \(first in row 7\); drop or impute"),
        ({"shards": [shard(1), (torch.zeros(3, 5), torch.zeros(3).long())]}, r"client 1 .*\(5,\).*bring all shards"),
        (
            {"shards": [shard(1), (torch.zeros(3, 2), torch.zeros(2).long())]},
            "client 1 has columns of different length",
        ),
        ({"shards": [shard(1), (torch.zeros(3, 2),)]}, "client 1 has 1 columns, client 0 has 2"),
        ({"shards": [("a", "b")]}, "client 0 holds a str that is no numeric array"),
        ({"target": (torch.zeros(3, 5), torch.zeros(3).long())}, r"rows of the target have shape \(5,\)"),
        ({"model": "linear"}, "model is a str, not a torch.nn.Module"),
        ({"model": nn.Linear}, "model is a type, not a torch.nn.Module"),
        ({"model": nn.ReLU()}, "ReLU has no parameters"),
        ({"model": nn.Linear(5, 2)}, "model does not take inputs of shape"),
        ({"model": nn.Linear(2, 1)}, "labels from 0 to 1, but the model has 1 outputs"),
        ({"loss": "crossentropy"}, "unknown loss 'crossentropy'; did you mean cross_entropy"),
        ({"loss": 3}, "loss is 3; give a name or a function"),
        ({"l2": -1.0}, "l2 is -1.0; it must be a number of at least 0"),
        ({"dtype": "float16"}, "dtype is 'float16'; it must be 'float32' or 'float64'"),
        ({"dtype": torch.float16}, "dtype is torch.float16; it must be 'float32' or 'float64'"),
        ({"device": "gpu"}, "run.device 'gpu' is none of cpu"),
    ],
)
def test_a_bad_problem(shards: list[Shard], net: nn.Module, more: dict[str, Any], complaint: str) -> None:
    given = {"shards": shards, "net": more.pop("model", net), **more}
    with pytest.raises(coterie.UsageError, match=complaint) as error:
        made(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda problem, method: coterie.fit(problem, "meritfed"), "'meritfed' is no method; make one"),
        (lambda problem, method: coterie.fit(problem, coterie.methods.meritfed), "is no method; make one"),
        (
            lambda problem, method: coterie.fit([problem], method),
            "fit takes a problem first, not a list; make one by coterie.Weighting",
        ),
        (lambda problem, method: coterie.fit(problem, method, rounds=0), "run.rounds = 0"),
        (lambda problem, method: coterie.fit(problem, method, rounds=2.5), "run.rounds = 2.5"),
        (lambda problem, method: coterie.fit(problem, method, seed=-1), "run.seed = -1"),
        (lambda problem, method: coterie.fit(problem, method, threads=0), "run.threads = 0"),
        (
            lambda problem, method: coterie.fit(problem, method, activ=0.5),
            "unknown key in .federation. 'activ'; did you mean active",
        ),
        (lambda problem, method: coterie.fit(problem, method, active=0.0), "federation.active = 0.0: .*greater than 0"),
        (
            lambda problem, method: coterie.fit(problem, method, target_at=9),
            "federation.target is client 9, but there are clients 0 … 3 only",
        ),
        (lambda problem, method: coterie.fit(problem, method, count=9), "federation.count = 9 exceeds the 4 clients"),
        (
            lambda problem, method: coterie.methods.meritfed(stp=0.1),
            "unknown key in .meritfed. 'stp'; did you mean step",
        ),
        (lambda *_: coterie.methods.meritfed(step=-1.0), "meritfed.step = -1.0: .*greater than 0"),
    ],
)
def test_a_bad_fit(shards: list[Shard], net: nn.Module, call: Callable[..., Any], complaint: str) -> None:
    with pytest.raises(coterie.UsageError, match=complaint):
        call(made(shards, net), coterie.methods.meritfed())


def test_a_method_that_needs_a_target_says_which_do_not(shards: list[Shard], net: nn.Module) -> None:
    problem = made(shards, net, target=None)
    with pytest.raises(coterie.UsageError, match=r"meritfed needs target; problem own data offers .*fedavg"):
        coterie.fit(problem, coterie.methods.meritfed())
    assert coterie.fit(problem, coterie.methods.fedavg(), rounds=1).weights is None


def test_the_root_is_small_and_complete() -> None:
    assert len(coterie.__all__) <= 20
    for name in coterie.__all__:
        assert getattr(coterie, name) is not None
    assert dir(coterie) == sorted(coterie.__all__)
    with pytest.raises(AttributeError, match="fitt"):
        _ = coterie.fitt
    assert sys.modules["coterie"].__version__


def test_a_nested_problem_of_ones_own_is_fitted() -> None:
    def inner(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return (batch.inputs @ y - batch.labels).square().mean() + (x.exp() * y.square()).sum()

    def outer(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return (batch.inputs @ y - batch.labels).square().mean()

    generator = torch.Generator().manual_seed(0)
    shards = [(torch.randn(30, 4, generator=generator), torch.randn(30, generator=generator)) for _ in range(3)]
    problem = coterie.Nested(inner, outer).on(shards, shards, x=torch.zeros(4), y=torch.zeros(4))
    method = coterie.methods.fednest(outer_step=0.5, step=0.2, lipschitz=10.0, batch="all")
    fit = coterie.fit(problem, method, rounds=10)
    assert fit.history[-1]["outer_loss"] < fit.history[1]["outer_loss"]
    assert sum(value.numel() for value in fit.variables.values()) == 8
    with pytest.raises(coterie.UsageError, match=r"fit\.variables"):
        _ = fit.model


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (nn.CrossEntropyLoss(), "not one number per row"),
        (nn.NLLLoss(reduction="none", weight=torch.ones(7)), "the loss does"),
    ],
)
def test_a_loss_that_is_not_by_row_is_refused(loss: Any, complaint: str) -> None:
    shards = [(torch.randn(6, 4), torch.tensor([0, 1, 2] * 2)) for _ in range(2)]
    with pytest.raises(coterie.UsageError, match=complaint):
        coterie.Weighting.on(shards, model=nn.Linear(4, 3), loss=loss)


@pytest.mark.parametrize("shard", [None, {"x": torch.zeros(3, 4)}, 5])
def test_a_shard_of_another_kind_is_refused(shard: Any) -> None:
    with pytest.raises(coterie.UsageError, match="client 0 is a"):
        coterie.Weighting.on([shard], model=nn.Linear(4, 3), loss="cross_entropy")


def test_true_is_not_a_step() -> None:
    with pytest.raises(coterie.UsageError, match="step"):
        coterie.methods.fedavg(step=True)


def test_compression_is_a_keyword_of_fit() -> None:
    shards = [(torch.ones(4, 50), torch.ones(4)) for _ in range(3)]
    problem = made(shards, nn.Linear(50, 1), target=None, loss="squared")
    method = coterie.methods.fedavg(step=0.01)
    plain, small = (fitted(problem, method, rounds=2, **more) for more in ({}, {"compress": "top-k", "ratio": 0.1}))
    assert small.ledger.total.bytes_up < plain.ledger.total.bytes_up / 4


@pytest.mark.parametrize(
    "documented",
    [coterie.fit, coterie.Fit, coterie.Weighting.on, coterie.machine.checked_device],
    ids=lambda f: f.__name__,
)
def test_examples_of_docstrings_run(documented: Any) -> None:
    names = {"checked_device": coterie.machine.checked_device}
    (found,) = DocTestFinder(recurse=False).find(documented, documented.__name__, globs=names)
    assert found.examples
    assert DocTestRunner().run(found).failed == 0
    if documented is not coterie.Fit:
        assert "Args:" in (documented.__doc__ or "")
