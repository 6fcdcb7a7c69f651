"""Rows at nodes: a study through messages gives the bits of problem `files` in one process, and misfits are found at
the site that has them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hospitals import hospitals, rows, write
from safetensors.torch import load_file

from coterie.engines.embedded import launch
from coterie.errors import UsageError
from coterie.experiment.config import load
from coterie.experiment.run import run
from coterie.federation.remote import InProcess, NodePolicy, Policy
from coterie.problems.files.findings import BadFiles
from coterie.problems.sites.agreement import Agreement, agree
from coterie.problems.sites.folder import Study
from coterie.problems.sites.holding import Choices, examine, raw_node
from coterie.problems.sites.terms import Terms, own_tables, terms_of

OPEN = NodePolicy(seconds=0.0)
SAME: dict[str, Any] = {
    "run.rounds": 3,
    "run.baselines": [],
    "run.threads": 1,
    "federation.mode": "sequential",
    "federation.chunk": 1,
    "federation.clip": "none",
}


def quiet(name: str, is_baseline: bool) -> None:
    """No observer."""


def study_of(folder: Path, mine: Path, **options: Any) -> Study:
    terms, _ = terms_of(mine, "sick", **options)
    study = Study(folder / "study", "trial", terms, mine, "embedded")
    study.write()
    return study


def trial(study: Study, pattern: str, out: Path, **flags: Any) -> dict[str, Any]:
    settings = {"run.problem": "study", "run.engine": "embedded", "problem.folder": str(study.folder)}
    config = load(None, {}, {**SAME, **settings, "problem.sites": pattern, **flags})
    return launch(config, out, quiet, force=False, resume=False, options={})


@pytest.mark.parametrize(
    "options",
    [{}, {"scaling": "own"}, {"scaling": "robust", "impute": "regression"}, {"kind": "regression"}],
    ids=["common", "own", "robust", "regression"],
)
def test_sites_give_the_bits_of_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    mine, _ = hospitals(tmp_path)
    study, pattern = study_of(tmp_path, mine, **options), str(tmp_path / "sites" / "*.csv")
    given = {f"problem.{key}": value for key, value in options.items()}
    files = {"problem.clients": pattern, "problem.target": str(mine), "problem.label": "sick", **given}
    extra: dict[str, Any] = {} if "kind" in options else {"problem.balance": True, "problem.model": "mlp"}
    here = run(load(None, {}, {**SAME, "run.problem": "files", **files, **extra}), tmp_path / "here", quiet)
    there = trial(study, pattern, tmp_path / "there", **extra)
    assert here["final"] == there["final"]
    assert here["weights"] == there["weights"]
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("here", "there")]
    assert models[0].keys() == models[1].keys()
    assert all(bool((models[0][key] == models[1][key]).all()) for key in models[0])
    stored = [json.loads((tmp_path / name / "preprocess.json").read_text()) for name in ("here", "there")]
    assert {k: v for k, v in stored[0].items() if k != "clients"} == {
        k: v for k, v in stored[1].items() if k != "clients"
    }
    moved = json.loads((tmp_path / "there" / "ledger.json").read_text())
    assert {"files/column-moments", "files/category-counts", "sites/hello"} <= moved["by_cause"].keys()


def test_terms_survive_their_file(tmp_path: Path) -> None:
    mine, _ = hospitals(tmp_path)
    study = study_of(tmp_path, mine)
    assert Study.read(study.folder).terms == study.terms
    assert study.terms.dates == ("seen",)
    assert study.terms.classes == ("0", "1")
    other = Terms.from_dict({**study.terms.as_dict(), "least_rows": 21})
    assert other.digest != study.terms.digest


FAULTY = {
    "missing column": (lambda r: {k: v for k, v in r.items() if k != "dose"}, "columns", "no column 'dose'"),
    "renamed column": (
        lambda r: {("Dose " if k == "dose" else k): v for k, v in r.items()},
        "columns",
        "may be the same",
    ),
    "words of a name in another order": (
        lambda r: {("SICK" if k == "sick" else k): v for k, v in r.items()},
        "columns",
        "the label; 'SICK' may be the same",
    ),
    "other unit": (lambda r: {**r, "dose": r["dose"] * 1000}, "unit", "1,000 times larger"),
    "label in words": (lambda r: {**r, "sick": "Yes" if r["sick"] else "No"}, "label", "Yes → 1"),
    "label in other words": (
        lambda r: {**r, "sick": "ill" if r["sick"] else "well"},
        "label",
        "none of its classes 'ill', 'well'",
    ),
    "label 1 and 2": (lambda r: {**r, "sick": r["sick"] + 1}, "label", "2 → 1"),
    "unseen category": (lambda r: {**r, "pain": "dull"}, "unseen", "'dull'"),
    "words for numbers": (lambda r: {**r, "dose": "much"}, "numbers", "'much'"),
    "code for no value": (lambda r: {**r, "age": 99999 if r["dose"] > 4.5 else r["age"]}, "values", "99999"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_misfit_is_told_at_its_site_and_without_values_to_others(tmp_path: Path, name: str) -> None:
    mine, _ = hospitals(tmp_path)
    study = study_of(tmp_path, mine)
    change, kind, said = FAULTY[name]
    path = write(tmp_path / "theirs.csv", rows(20, 60), change)
    found = examine(path, study.terms)
    assert {fault.kind for fault in found.faults} == {kind}, found.faults
    assert said in found.faults[0].what
    assert found.faults[0].remedy
    assert not any(word in found.public for word in ("Yes", "dull", "much", "99999", "theirs", "1,000"))


def test_remedies_name_the_column_the_factor_and_the_words(tmp_path: Path) -> None:
    mine, _ = hospitals(tmp_path)
    terms = study_of(tmp_path, mine).terms
    changes = (
        (lambda r: {**r, "dose": r["dose"] * 1000}, '{"dose" = 1000}'),
        (lambda r: {**r, "dose": r["dose"] / 1000}, '{"dose" = 0.001}'),
        (lambda r: {**r, "sick": "ill" if r["sick"] else "well"}, '{"ill" = "0", "well" = "1"}'),
    )
    for change, remedy in changes:
        (fault,) = examine(write(tmp_path / "theirs.csv", rows(20, 60), change), terms).faults
        assert remedy in fault.remedy
        assert "--policy" in fault.remedy
    assert "is a folder" in examine(tmp_path, terms).faults[0].what
    with pytest.raises(UsageError, match=r"data\.align_labels leads to '7'"):
        examine(tmp_path / "theirs.csv", terms, Choices.of({"align_labels": {"ill": "7", "well": "0"}}))


def test_a_site_without_faults_may_have_more_columns_and_must_have_rows(tmp_path: Path) -> None:
    mine, files = hospitals(tmp_path)
    study = study_of(tmp_path, mine)
    wide = examine(write(tmp_path / "wide.csv", rows(3, 40), lambda r: {"patient": "p", **r}), study.terms)
    assert not wide.faults
    assert "patient" in wide.notes[0]
    few = examine(write(tmp_path / "few.csv", rows(3, 12)), study.terms)
    assert [fault.kind for fault in few.faults] == ["rows"]
    assert "12" not in few.public
    assert examine(tmp_path / "none.csv", study.terms).faults[0].kind == "file"
    assert not examine(files["north"], study.terms).faults


def test_a_site_may_decide_what_is_done(tmp_path: Path) -> None:
    mine, _ = hospitals(tmp_path)
    study = study_of(tmp_path, mine)
    path = write(
        tmp_path / "theirs.csv",
        rows(20, 60),
        lambda r: {**r, "dose": r["dose"] * 1000, "sick": "Yes" if r["sick"] else "No", "pain": "dull"},
    )
    choices = Choices.of({"units": {"dose": 1000}, "align_labels": True, "unseen": "missing"})
    found = examine(path, study.terms, choices)
    assert not found.faults
    assert found.tables is not None
    assert set(found.tables.holders[0].words[-1]) == {"0", "1"}
    assert found.tables.holders[0].words[0] == {}
    assert float(found.tables.numbers[:, study.terms.numeric.index("dose")].mean()) < 10
    shared = examine(path, study.terms, Choices.of({"units": {"dose": 1000}, "align_labels": True, "unseen": "share"}))
    assert not shared.faults
    assert any("leave this site" in note for note in shared.notes)
    with pytest.raises(UsageError, match=r"data\.unit is no setting"):
        Choices.of({"unit": 1})
    with pytest.raises(UsageError, match="positive number"):
        Choices.of({"units": {"dose": "much"}})


def test_a_trial_names_every_fault_of_every_site(tmp_path: Path) -> None:
    mine, _ = hospitals(tmp_path)
    study = study_of(tmp_path, mine)
    write(tmp_path / "sites" / "west.csv", rows(9, 50), lambda r: {**r, "dose": r["dose"] * 1000, "pain": "dull"})
    with pytest.raises(BadFiles) as caught:
        trial(study, str(tmp_path / "sites" / "*.csv"), tmp_path / "out")
    assert {(one.file, "unit" in one.what or "words" in one.what) for one in caught.value.findings} == {("west", True)}
    assert not (tmp_path / "out").exists()


def test_whoever_fails_in_the_handshake_is_left_out_and_named(tmp_path: Path) -> None:
    mine, files = hospitals(tmp_path)
    study = study_of(tmp_path, mine)
    nodes = {}
    for k, (name, path) in enumerate(files.items()):
        tables = examine(path, study.terms).tables
        assert tables is not None
        policy = OPEN if name != "north" else NodePolicy(works=("sites/*",), seconds=0.0)
        nodes[name] = raw_node(tables, k, policy=policy)
    del nodes["south"]
    own = own_tables(mine, study.terms)
    found = agree(InProcess(nodes), study.terms, list(files), own, Policy(patience=0.5))
    assert [site.name for site in found.sites] == ["east"]
    assert "matches no pattern of works" in found.left_out["north"]
    assert found.left_out["south"] == "it is not there"
    assert found.write(study.folder).stem == found.digest
    assert Agreement.read(study.folder, found.digest) == found
    numeric = [{**column, "deviation": 2.0 * column["deviation"]} for column in found.preparation["numeric"]]
    scales = {**found.preparation, "numeric": numeric}
    assert replace(found, preparation=scales).digest != found.digest  # two agreements that differ in scales only
    with pytest.raises(UsageError, match="no agreement"):
        Agreement.read(study.folder, "other")


def test_a_trial_can_be_resumed(tmp_path: Path) -> None:
    mine, _ = hospitals(tmp_path)
    study, pattern = study_of(tmp_path, mine), str(tmp_path / "sites" / "*.csv")
    whole = trial(study, pattern, tmp_path / "whole")
    trial(study, pattern, tmp_path / "part", **{"run.rounds": 2})
    text = (tmp_path / "part" / "config.toml").read_text()
    (tmp_path / "part" / "config.toml").write_text(text.replace("rounds = 2", "rounds = 3"))
    config = load(tmp_path / "part" / "config.toml")
    rest = launch(config, tmp_path / "part", quiet, force=False, resume=True, options={})
    assert rest["final"] == whole["final"]


def test_the_problem_says_how_it_is_run() -> None:
    from coterie.problems.base import Context
    from coterie.problems.sites import study

    with pytest.raises(UsageError, match="coterie run --study"):
        study(Context())
