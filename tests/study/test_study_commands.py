"""The commands of a partner and a coordinator that need no network."""

import json
from pathlib import Path

import pytest
from hospitals import hospitals, rows, write
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import UsageError
from coterie.problems.sites.terms import terms_of
from coterie.study import site as partner
from coterie.study.home import Home
from coterie.study.invitation import Invitation, expiry

RUNNER = CliRunner()


def test_a_partner_looks_first(tmp_path: Path) -> None:
    mine, files = hospitals(tmp_path)
    terms, _ = terms_of(mine, "sick")
    invitation = Invitation("demo", "north", "nvflare", "localhost:1", expiry(), terms, {})
    path = str(invitation.write(tmp_path / "north.invite"))
    fine = RUNNER.invoke(app, ["site", "check", str(files["north"]), "--invitation", path])
    assert fine.exit_code == 0, fine.output
    assert "What will leave this site" in fine.output
    assert "67 rows fit the study" in fine.output
    assert "A curious coordinator could learn: single rows of yours: each answer is from at least 8 rows" in fine.output
    other = write(tmp_path / "other.csv", rows(3, 40), lambda r: {**r, "sick": "Yes" if r["sick"] else "No"})
    bad = RUNNER.invoke(app, ["site", "check", str(other), "--invitation", path])
    assert bad.exit_code == 1
    assert "Proposed: No → 0, Yes → 1" in bad.output
    settings = tmp_path / "site.toml"
    settings.write_text("[data]\nalign_labels = true\n")
    mended = RUNNER.invoke(app, ["site", "check", str(other), "--invitation", path, "--policy", str(settings)])
    assert mended.exit_code == 0, mended.output
    assert f"--data {other} --policy {settings}" in mended.output
    old = Invitation("demo", "north", "nvflare", "localhost:1", expiry(-1.0), terms, {})
    late = RUNNER.invoke(app, ["site", "check", str(other), "--invitation", str(old.write(tmp_path / "old.invite"))])
    assert isinstance(late.exception, UsageError)


def test_a_coordinator_makes_a_study_to_try(tmp_path: Path) -> None:
    mine, _ = hospitals(tmp_path)
    folder = str(tmp_path / "trial")
    made = ["study", "new", folder, "--label", "sick", "--data", str(mine), "--engine", "embedded"]
    assert RUNNER.invoke(app, made).exit_code == 0
    assert isinstance(RUNNER.invoke(app, made).exception, UsageError)  # it is there already
    wrong = RUNNER.invoke(app, ["study", "new", folder + "2", "--label", "sickness", "--data", str(mine)])
    assert isinstance(wrong.exception, UsageError)
    strange = RUNNER.invoke(app, [*made[:2], folder + "3", *made[3:-1], "flower"])
    assert "studies run on nvflare" in str(strange.exception)
    assert "whoever submits a run sends the code" in str(strange.exception)
    tried = ["run", "--study", folder, "--sites", str(tmp_path / "sites" / "*.csv"), "--rounds", "2", "--json"]
    done = RUNNER.invoke(app, [*tried, "--set", "run.baselines=[]", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["outcome"] == "finished"
    live = RUNNER.invoke(app, ["run", "--study", folder])
    assert isinstance(live.exception, UsageError)
    assert "name files that stand for the sites: --sites" in str(live.exception)
    alone = RUNNER.invoke(app, ["run", "--sites", "sites/*.csv"])
    assert "--sites is for --study" in str(alone.exception)
    assert isinstance(RUNNER.invoke(app, ["study", "status", str(tmp_path)]).exception, UsageError)
    looked = RUNNER.invoke(app, ["doctor"])
    assert "disk" in looked.output


@pytest.mark.parametrize("words", [["site", "log"], ["site", "receive"], ["site", "join"], ["site", "leave"]])
def test_a_machine_without_a_site_says_so(tmp_path: Path, words: list[str]) -> None:
    found = RUNNER.invoke(app, [*words, "--home", str(tmp_path)])
    assert isinstance(found.exception, UsageError)
    assert "is no site" in str(found.exception)


def test_a_site_that_joins_again_takes_what_is_named_and_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partner, "run", lambda home: None)
    mine, files = hospitals(tmp_path)
    invitation = Invitation("demo", "north", "nvflare", "localhost:1", expiry(), terms_of(mine, "sick")[0], {})
    first, strict = tmp_path / "first.toml", tmp_path / "strict.toml"
    first.write_text("[policy]\nleast_rows = 2\n")
    strict.write_text("[policy]\nleast_rows = 1000\n")
    home = Home(tmp_path / "home")
    again = ["site", "join", "--home", str(home.folder)]
    to = [*again, "--invitation", str(invitation.write(tmp_path / "north.invite"))]
    assert RUNNER.invoke(app, [*to, "--data", str(files["north"]), "--policy", str(first)]).exit_code == 0
    assert RUNNER.invoke(app, to).exit_code == 0
    assert home.settings()["policy"] == str(first)
    assert RUNNER.invoke(app, [*again, "--data", str(files["south"])]).exit_code == 0
    assert (home.settings()["data"], home.settings()["policy"]) == (str(files["south"]), str(first))
    refused = RUNNER.invoke(app, [*again, "--policy", str(strict)])
    assert "asks for more rows" in str(refused.exception)
