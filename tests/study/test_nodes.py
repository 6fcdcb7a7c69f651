"""A site's node for a job: its own file and terms, whatever the job says; and nothing of its rows reaches anybody."""

import io
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from hospitals import hospitals, private_values, rows, write

from coterie import __version__
from coterie.engines.embedded import plan_of
from coterie.errors import NoClients, RunError
from coterie.experiment.config import Config, load
from coterie.federation.remote import Address, Beside, InProcess, Message, Node, Policy, Trouble
from coterie.problems.sites.agreement import SECOND, Agreement, agree
from coterie.problems.sites.folder import Study
from coterie.problems.sites.holding import HOME, Plan
from coterie.problems.sites.terms import own_tables, terms_of
from coterie.study.home import PROTECTIONS, Home, Protection, SitePolicy, read_settings, suggested, totals
from coterie.study.invitation import Invitation, expiry
from coterie.study.jobs import for_sites, perform, share
from coterie.study.node import Refusing, at_site
from coterie.study.site import check, receive, what_is_learnt, what_leaves, what_stays


class Recorded(InProcess):
    """Keeps every message of both directions, and knows who is who, as certificates tell."""

    def __init__(self, nodes: Mapping[Address, Node]) -> None:
        super().__init__(nodes)
        self.carried = io.BytesIO()

    def nodes(self) -> Mapping[Address, int | None]:
        return {name: k for k, name in enumerate(self.here)}

    def exchange(
        self, orders: Mapping[Address, Message], needed: Collection[Address], timeout: float
    ) -> list[tuple[Address, bytes | Trouble]]:
        answers = super().exchange(orders, needed, timeout)
        for order in orders.values():
            self.carried.write(bytes(order))
        for _, reply in answers:
            self.carried.write(reply if isinstance(reply, bytes) else str(reply).encode())
        return answers


def made(folder: Path, settings: str = "") -> tuple[Study, dict[str, Home]]:
    """A study, and the homes of its sites."""
    mine, files = hospitals(folder)
    terms, _ = terms_of(mine, "sick")
    study = Study(folder / "demo", "demo", terms, mine, "nvflare", sites=tuple(files))
    study.write()
    policy = folder / "site.toml"
    policy.parent.mkdir(exist_ok=True)
    policy.write_text(f"[policy]\nseconds = 0\n{settings}")
    homes = {}
    for name, path in files.items():
        home = Home(folder / "homes" / name)
        home.join(Invitation("demo", name, "nvflare", "localhost:1", expiry(), terms, {}), path, policy)
        homes[name] = home
    return study, homes


def nodes(homes: Mapping[str, Home], job: dict[str, Any]) -> dict[Address, Node]:
    return {name: at_site(home, json.loads(json.dumps(job))) for name, home in homes.items()}


def training_plan(study: Study, config: Config) -> Plan:
    return plan_of(config, Agreement.read(study.folder, config.problem["agreement"]))


def agreed(study: Study, homes: Mapping[str, Home], **settings: Any) -> tuple[Config, Recorded]:
    network = Recorded(nodes(homes, for_sites(study, "agree", study.sites)))
    job = {
        "study": str(study.folder),
        "stage": "agree",
        "timeout": 5.0,
        "patience": 0.2,
        "sites": list(study.sites),
        "absent": {},
    }
    digest = perform(job, lambda sites: network)["agreement"]
    flags: dict[str, Any] = {"run.rounds": 2, "run.threads": 1, "run.problem": "study", "run.engine": "nvflare"}
    flags |= {"problem.folder": str(study.folder), "problem.agreement": digest, "federation.patience": 0.2}
    return load(None, {}, flags | settings), network


def test_a_study_from_handshake_to_model_and_no_value_of_a_row_leaves(tmp_path: Path, capfd: Any) -> None:
    study, homes = made(tmp_path)
    config, first = agreed(study, homes)
    second = Recorded(nodes(homes, for_sites(study, "train", study.sites, training_plan(study, config))))
    out = tmp_path / "out"
    job = {"study": str(study.folder), "stage": "train", "config": config.as_toml(), "folder": str(out)}
    done = perform({**job, "force": False, "share": True}, lambda sites: second)
    assert done["outcome"] == "finished"
    assert done["received"] == list(homes)
    values = private_values(tmp_path)
    seen = {
        "messages": first.carried.getvalue() + second.carried.getvalue(),
        "output": str(capfd.readouterr()).encode(),
    }
    for path in (*study.folder.rglob("*"), *out.rglob("*")):
        if path.is_file():
            seen[str(path)] = path.read_bytes()
    for where, data in seen.items():
        assert not [value for value in values if value in data], where
    for home in homes.values():
        causes = {row["cause"]: row for row in totals(home)}
        assert causes["files/column-moments"]["sent"] > 0
        assert causes["shared/gradient"]["orders"] == 2
        (model,) = receive(home, home.folder / "taken")
        assert (model / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
        assert "clients" not in json.loads((model / "preprocess.json").read_text())


TOGETHER = {"federation.secure": True, "method.solver": "lagged"}
NOISY = {"privacy.clip": 1.0, "privacy.noise": 10.0}


@pytest.mark.parametrize(("protection", "settings"), [("sums", TOGETHER), ("noise", NOISY)])
def test_a_study_is_protected_as_its_settings_say(
    tmp_path: Path, protection: Protection, settings: dict[str, Any]
) -> None:
    """With what `study new` writes for partners, a run of that kind ends well; in a run in the open no site answers."""
    pytest.importorskip({"sums": "cryptography", "noise": "dp_accounting"}[protection], reason="an extra of coterie")
    study, homes = made(tmp_path, PROTECTIONS[protection])
    for k, chosen in enumerate(({}, settings)):
        config, _ = agreed(study, homes, **chosen)
        there = Recorded(nodes(homes, for_sites(study, "train", study.sites, training_plan(study, config))))
        out = tmp_path / f"out-{k}"
        job = {"study": str(study.folder), "stage": "train", "config": config.as_toml(), "folder": str(out)}
        done = perform({**job, "force": False, "share": False}, lambda sites, there=there: there)
        assert done["outcome"] == "finished", done["message"]
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        refused = {event["client"]: event["reason"] for event in events if event["event"] == "refused"}
        assert sorted(refused) == ([] if k else [0, 1, 2])  # the coordinator's own rows are client 3
        assert all("is secure" in reason or "asks for no noise" in reason for reason in refused.values())
    if protection == "noise":  # the statistics of the handshake are exact, and said to be
        assert any(text.startswith("statistics: ") for text in done["privacy"]["not_covered"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "9.9"}, "install the same one on both sides"),
        ({"terms": "0" * 16}, "another study"),
        ({"sites": ["east"]}, "another study"),
        ({"stage": "other"}, "policy.stages"),
    ],
)
def test_a_job_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    study, homes = made(tmp_path)
    node = at_site(homes["north"], {**for_sites(study, "agree", study.sites), **change})
    assert isinstance(node, Refusing)
    assert said in node.reason


def test_a_site_that_lost_its_file_or_has_faults_says_the_kind_only(tmp_path: Path, capsys: Any) -> None:
    study, homes = made(tmp_path)
    write(tmp_path / "sites" / "north.csv", rows(5, 60), lambda r: {**r, "pain": "secret"})
    (tmp_path / "sites" / "south.csv").unlink()
    job = for_sites(study, "agree", study.sites)
    own = own_tables(study.data, study.terms)
    found = agree(Recorded(nodes(homes, job)), study.terms, study.sites, own, Policy(patience=0.2))
    assert [site.name for site in found.sites] == ["east"]
    assert found.left_out["north"] == "it has categories that the study does not know: 'pain'"
    assert found.left_out["south"] == "its file cannot be read"
    assert "secret" not in str(found.left_out)
    assert "secret" in capsys.readouterr().out
    assert next(homes["north"].journal())["outcome"].startswith("it has categories")


def test_a_policy_bars_columns_models_and_stages(tmp_path: Path) -> None:
    study, homes = made(tmp_path, 'columns = ["age", "dose", "sick"]\n')
    node = at_site(homes["north"], for_sites(study, "agree", study.sites))
    assert isinstance(node, Refusing)
    study, homes = made(tmp_path / "other", 'models = ["logistic"]\nreceive = false\n')
    config, _ = agreed(study, homes)
    job = for_sites(study, "train", study.sites, training_plan(study, config))
    assert not isinstance(at_site(homes["north"], job), Refusing)
    for model in ("mlp", "os:system"):
        plan = Plan(**job["plan"])._replace(model=model)._asdict()
        assert isinstance(at_site(homes["north"], {**job, "plan": plan}), Refusing)
    out = tmp_path / "out"
    network = InProcess(nodes(homes, job))
    told = {"study": str(study.folder), "stage": "train", "config": config.as_toml(), "folder": str(out)}
    perform({**told, "force": False, "share": False}, lambda sites: network)
    with pytest.raises(NoClients):
        share(study, network, study.sites, out, "run1")
    assert not (homes["north"].folder / "received").exists()


def test_a_second_site_with_the_same_invitation_is_left_out(tmp_path: Path, monkeypatch: Any) -> None:
    study, homes = made(tmp_path)
    only = {"north": homes["north"]}
    job = for_sites(study, "agree", ["north"])
    monkeypatch.setenv(HOME, str(homes["north"].folder))
    own = own_tables(study.data, study.terms)
    first = agree(InProcess(nodes(only, job)), study.terms, ["north"], own, Policy(patience=0.2))
    known = {site.name: site.instance for site in first.sites}
    assert known["north"]
    again = agree(InProcess(nodes(only, job)), study.terms, ["north"], own, Policy(patience=0.2), known=known)
    assert again.digest == first.digest
    (homes["north"].folder / "instance").write_text("12345")
    with pytest.raises(RunError, match=SECOND[:30]):
        agree(InProcess(nodes(only, job)), study.terms, ["north"], own, Policy(patience=0.2), known=known)


def test_the_coordinators_own_node_is_beside_the_others(tmp_path: Path) -> None:
    study, homes = made(tmp_path)
    found = nodes(homes, for_sites(study, "agree", study.sites))
    own = found.pop("south")
    network = Beside(InProcess(found), own)
    assert dict(network.nodes()) == {"east": None, "north": None, "(here)": 2}


def test_a_site_is_told_what_leaves(tmp_path: Path) -> None:
    study, homes = made(tmp_path)
    lines = what_leaves(study.terms, SitePolicy())
    assert any("count, mean and spread" in line and "dose" in line for line in lines)
    assert any("every category of pain, sick" in line for line in lines)
    assert any("no row" in line for line in what_stays(study.terms))
    less = what_leaves(study.terms, SitePolicy(stages=("train",)))
    assert not any("category" in line for line in less)
    assert check(tmp_path / "sites" / "north.csv", homes["north"].invitation, None).fits
    assert __version__ == homes["north"].invitation.version


@pytest.mark.parametrize(
    ("protection", "more", "said"),
    [
        ("trust", "", "single rows of yours: each answer is from at least 16 rows"),
        (
            "sums",
            "",
            "1 single numbers of yours per round (fewer than the model has parameters in all), and sums over at",
        ),
        ("sums", "target = true", "single rows of yours: policy.target = true"),
        ("noise", "", "hardly anything of a single row, whatever it asks: every answer in training has noise"),
        ("noise", "target = true", "all that answers of a target tell, which policy.target = true lets leave"),
    ],
)
def test_a_site_is_told_what_a_curious_coordinator_could_learn(
    tmp_path: Path, protection: Protection, more: str, said: str
) -> None:
    path = tmp_path / "site.toml"
    path.write_text(suggested(protection) + more)
    assert what_is_learnt(read_settings(path)[0].node).startswith(said)
