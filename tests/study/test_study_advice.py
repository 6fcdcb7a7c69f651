"""Advice while partners keep their rows: the answer of one process, whoever leaves is named."""

from pathlib import Path
from typing import Any

import pytest
from hospitals import hospitals
from test_sites import study_of

from coterie.advise.advise import Effort, advise_on
from coterie.experiment.config import load
from coterie.federation.remote import InProcess
from coterie.problems import Context
from coterie.problems.files import load_files
from coterie.study.advice import advise_trial

EFFORT = Effort(1, 19, 0)


def settings(**flags: Any) -> dict[str, Any]:
    return {"run.rounds": 3, "run.baselines": [], "run.threads": 1, **flags}


def test_the_advice_of_a_study_is_that_of_one_process(tmp_path: Path) -> None:
    mine, _ = hospitals(tmp_path)
    study, pattern = study_of(tmp_path, mine), str(tmp_path / "sites" / "*.csv")
    flags = {"run.problem": "study", "run.engine": "embedded", "problem.folder": str(study.folder)}
    config = load(None, {}, settings(**flags, **{"problem.sites": pattern}))
    found = advise_trial(config, tmp_path / "advice", EFFORT)
    where = {"clients": pattern, "target": str(mine), "label": "sick"}
    here = load(None, {}, settings(**{"run.problem": "files", **{f"problem.{k}": v for k, v in where.items()}}))
    wanted = advise_on(load_files(Context(0), **where), here, None, EFFORT)
    for theirs, ours in zip(found["partners"], wanted["partners"], strict=True):
        assert theirs["name"] == ours["name"].removesuffix(".csv")
        assert theirs["verdict"] == ours["verdict"]
        for key in ("gain", "agreement"):
            assert theirs[key] == pytest.approx(ours[key], abs=1e-5)
    for name in ("alone", "helpers", "all"):
        assert found["strategies"][name]["values"] == pytest.approx(wanted["strategies"][name]["values"], abs=1e-5)
    assert found["delivered"]["strategy"] == wanted["delivered"]["strategy"]
    assert "learned" not in found["strategies"]
    assert (tmp_path / "advice" / "model" / "model.safetensors").is_file()


def test_a_site_that_leaves_is_named_and_the_rest_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, _ = hospitals(tmp_path)
    study, pattern = study_of(tmp_path, mine), str(tmp_path / "sites" / "*.csv")
    flags = {"run.problem": "study", "run.engine": "embedded", "problem.folder": str(study.folder)}
    patient = {"federation.retries": 0, "federation.timeout": 0.2, "federation.patience": 0.2}
    config = load(None, {}, settings(**flags, **patient, **{"problem.sites": pattern}))
    exchange, calls = InProcess.exchange, 0

    def leaving(self: InProcess, orders: Any, needed: Any, timeout: float) -> Any:
        nonlocal calls
        calls += "north" in self.here
        if calls > 20:
            self.here.pop("north", None)
        return exchange(self, orders, needed, timeout)

    monkeypatch.setattr(InProcess, "exchange", leaving)
    said: list[str] = []
    found = advise_trial(config, tmp_path / "advice", EFFORT, say=said.append)
    assert [partner["name"] for partner in found["partners"]] == ["east", "south"]
    assert any(note.startswith("north takes no part: it did not answer") for note in found["notes"])
    assert "north left; the advice begins again with the others" in said
