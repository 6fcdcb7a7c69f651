"""Every site a target: the models and weights of one process, and each site receives its own, and nobody else's."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from hospitals import hospitals
from safetensors.torch import load_file
from test_nodes import agreed, made, nodes, training_plan
from test_sites import SAME, quiet, study_of
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import UsageError
from coterie.experiment.config import load
from coterie.experiment.run import run
from coterie.federation.remote import Address, InProcess, Message, Node, Trouble
from coterie.problems.files.problem import check_parts, divided
from coterie.study.delivery import ROW, files_of, keep, parcels
from coterie.study.home import RECEIVED, Home
from coterie.study.jobs import for_sites, perform
from coterie.study.site import receive

RUNNER = CliRunner()


def test_every_site_a_target_gives_the_bits_of_one_process(tmp_path: Path) -> None:
    mine, files = hospitals(tmp_path)
    study, pattern = study_of(tmp_path, mine), str(tmp_path / "sites" / "*.csv")
    where = {"problem.clients": pattern, "problem.target": str(mine), "problem.label": "sick"}
    flags = {**SAME, "run.method": "collaborate", "run.problem": "files", **where}
    here = run(load(None, {}, flags), tmp_path / "here", quiet)
    sets = [word for key, value in SAME.items() for word in ("--set", f"{key}={value}") if key != "run.rounds"]
    words = ["run", "--method", "collaborate", "--study", str(study.folder), "--sites", pattern, "--rounds", "3"]
    done = RUNNER.invoke(app, [*words, "--out", str(tmp_path / "there"), *sets])
    assert done.exit_code == 0, (done.output, done.exception)
    there = json.loads((tmp_path / "there" / "summary.json").read_text())
    assert here["weights"] == there["weights"]
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("here", "there"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert {key.partition(".")[0] for key in ours} == {f"client_{k}" for k in range(4)}
    # the coordinator has measured its own model; the sites theirs, and together these are the measures of one process
    assert {"test_loss", "validation_accuracy"} <= there["final"].keys()
    assert not [key for key in there["final"] if key.startswith("personal")]
    places = [*(tmp_path / "there" / "sites" / name for name in files), tmp_path / "there" / "own"]
    tested = [json.loads((place / ROW).read_text())["test"] for place in places]
    for key in ("loss", "accuracy"):
        mean = sum(test[key] for test in tested) / len(tested)
        assert mean == pytest.approx(here["final"][f"personal_{key}"], abs=1e-6)
    rows = [json.loads((place / ROW).read_text())["weights"] for place in places]
    assert [list(row.values()) for row in rows] == there["weights"]
    assert list(rows[0]) == [*files, "(the coordinator)"]
    predicted = RUNNER.invoke(app, ["predict", str(places[0]), str(files["east"])])
    assert predicted.exit_code == 0, predicted.output
    rmtree(tmp_path / "there" / "sites")
    again = RUNNER.invoke(app, ["resume", str(tmp_path / "there")])  # also what was stopped before it was delivered
    assert again.exit_code == 0, again.output
    assert [json.loads((place / ROW).read_text())["weights"] for place in places] == rows


class ByAddress(InProcess):
    """Keeps the orders to each site."""

    def __init__(self, nodes: Mapping[Address, Node]) -> None:
        super().__init__(nodes)
        self.sent: dict[Address, bytes] = {}

    def nodes(self) -> Mapping[Address, int | None]:
        return {name: k for k, name in enumerate(self.here)}

    def exchange(
        self, orders: Mapping[Address, Message], needed: Collection[Address], timeout: float
    ) -> list[tuple[Address, bytes | Trouble]]:
        for address, order in orders.items():
            self.sent[address] = self.sent.get(address, b"") + bytes(order)
        return super().exchange(orders, needed, timeout)


def collaborated(folder: Path) -> tuple[dict[str, Home], ByAddress, Path]:
    study, homes = made(folder)
    config, _ = agreed(study, homes)
    flags = {"run.method": "collaborate", "run.problem": "study", "run.engine": "nvflare", "run.rounds": 2}
    flags |= {f"problem.{key}": config.problem[key] for key in ("folder", "agreement")}
    config = load(None, {}, {**flags, "run.threads": 1, "federation.patience": 0.2})
    network = ByAddress(nodes(homes, for_sites(study, "train", study.sites, training_plan(study, config))))
    out = folder / "out"
    job = {"study": str(study.folder), "stage": "train", "config": config.as_toml(), "folder": str(out)}
    done = perform({**job, "force": False, "share": True}, lambda sites: network)
    assert done["outcome"] == "finished"
    assert done["received"] == list(homes)
    return homes, network, out


def test_a_site_receives_its_own_model_and_row_and_nobody_elses(tmp_path: Path) -> None:
    homes, network, out = collaborated(tmp_path)
    own = dict(zip([*homes, "(the coordinator)"], parcels(out), strict=True))
    numbers = {name: _numbers(files["model.safetensors"]) for name, files in own.items()}
    rows = {name: [str(w).encode() for w in json.loads(files[ROW])["weights"].values()] for name, files in own.items()}
    for name, home in homes.items():
        (taken,) = receive(home, tmp_path / "taken" / name)
        assert _numbers((taken / "model.safetensors").read_bytes()) == numbers[name]
        row = json.loads((taken / ROW).read_text())
        assert row["site"] == name
        assert list(row["weights"]) == [*homes, "(the coordinator)"]
        assert 0.0 <= row["test"]["accuracy"] <= 1.0
        assert row["test_rows"] == divided({"east": 60, "north": 67, "south": 74}[name], 0.4, 0.2)[2]
        everything = b"".join(path.read_bytes() for path in home.folder.rglob("*") if path.is_file())
        for data in (everything, network.sent[name]):
            assert numbers[name] in data
            assert any(weight in data for weight in rows[name])
            for other in own.keys() - {name}:
                assert numbers[other] not in data
                assert not any(weight in data for weight in set(rows[other]) - set(rows[name]))
    assert _numbers((out / "own" / "model.safetensors").read_bytes()) == numbers["(the coordinator)"]


def _numbers(model: bytes) -> bytes:
    """The numbers of a safetensors file, without its header, whose entries have no fixed order."""
    return model[8 + int.from_bytes(model[:8], "little") :]


def test_what_is_sent_to_a_site_is_checked_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model"):
        files_of((torch.zeros(3),))
    with pytest.raises(UsageError, match="no model"):
        files_of((torch.zeros(3), torch.zeros(3)))
    row = {"site": "north", "rounds": 2, "weights": {"north": 1.0}}
    files = {"model.safetensors": b"", "preprocess.json": b"{}", ROW: json.dumps(row).encode()}
    with pytest.raises(UsageError, match="another site's"):
        keep(tmp_path / RECEIVED, files, "south", None)
    with pytest.raises(UsageError, match="no row of weights"):
        keep(tmp_path / RECEIVED, {**files, ROW: b"[1]"}, "north", None)
    assert not (tmp_path / RECEIVED).exists()


def test_a_site_whose_rows_are_too_few_to_be_split_is_named() -> None:
    check_parts([("north", 5)], 0.4, 0.2)
    with pytest.raises(UsageError, match="north has 2 rows"):
        check_parts([("north", 2)], 0.4, 0.2)
    with pytest.raises(UsageError, match="must be positive"):
        check_parts([("north", 50)], 0.0, 0.2)
