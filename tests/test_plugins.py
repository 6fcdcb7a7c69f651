"""Methods, problems and engines of others: by their code, by a file, by an entry point; and whose word admits them."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie import plugins
from coterie.cli.compare import _by_method
from coterie.consent import VARIABLE, allowing
from coterie.engines.load import load_node, read_config
from coterie.engines.own import ClientData
from coterie.errors import UsageError
from coterie.experiment.build import node_of
from coterie.experiment.compare import plan
from coterie.experiment.config import load, resolve
from coterie.federation import naming
from coterie.federation.remote.codec import CodecError
from coterie.methods.registry import METHODS, method_entry
from coterie.problems.catalogue.registry import PROBLEMS, problem_entry
from coterie.testing import check_problem

Command = Callable[..., Any]
SOBA = Path(__file__).resolve().parent.parent / "examples" / "coterie-soba" / "coterie_soba.py"
SMALL = ("--problem", "nested-quadratic", "--set", "problem.clients=3", "--set", "federation.mode=vmap", "--rounds", 3)
FACTORIES = """
from coterie.methods.base import validated
from coterie.settings import Positive

def five(*, step: Positive = 0.1):
    return 5

@validated
def six(*, step: Positive = 0.1):
    return 6

def failing(*, step: Positive = 0.1):
    raise KeyError("no such thing")

def untyped(*, step=0.1):
    return 5

def positional(step: Positive = 0.1):
    return 5

def lines(context, *, clients: int = 3):
    return "a problem"
"""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No consent from outside, a working directory of its own, and neither module nor work of another test."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    shutil.copy(SOBA, tmp_path / "mine.py")
    known, works = set(sys.modules), dict(naming._TABLE)
    yield
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    naming._TABLE.clear()
    naming._TABLE.update(works)


def install(site: Path, name: str, module: str, text: str, **groups: str) -> None:
    """A distribution of one module as pip leaves it, with entry points by group: "name = module:factory"."""
    (site / f"{module}.py").write_text(text)
    info = site / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\nSummary: of {name}\n")
    points = "".join(f"[coterie.{group}]\n{line}\n" for group, line in groups.items())
    (info / "entry_points.txt").write_text(points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages; coterie-soba is one of them."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    install(folder, "coterie-soba", "coterie_soba", SOBA.read_text(), methods="minisoba = coterie_soba:minisoba")
    return folder


def test_a_file_is_run_resumed_with_consent_and_told_if_it_changed(coterie: Command, tmp_path: Path) -> None:
    done = coterie("run", "--method", "mine.py:minisoba", *SMALL, "--out", "r")
    assert done.code == 0, done.err
    file = str(tmp_path / "mine.py")
    text = (tmp_path / "r" / "config.toml").read_text()
    assert f'method = "{file}:minisoba"' in text
    assert re.search(rf'^"{file}:minisoba" = "{file}, sha256 [0-9a-f]{{64}}"$', text, re.MULTILINE)
    assert VARIABLE not in os.environ  # the word was for one command
    (tmp_path / "r" / "config.toml").write_text(text.replace("rounds = 3", "rounds = 5"))
    assert "--allow-code" in coterie("resume", "r").err
    done = coterie("resume", "r", "--allow-code", "mine.py", "--json")
    assert done.json["rounds"] == 5
    assert done.json["method"] == "minisoba"
    assert "notes" not in done.json
    (tmp_path / "r" / "config.toml").write_text(text.replace("rounds = 3", "rounds = 7"))
    Path("mine.py").write_text(SOBA.read_text() + "\n# changed\n")
    del sys.modules["mine"]
    done = coterie("resume", "r", "--allow-code", "mine.py", "--json")
    assert any("resumed with other code" in note and "mine.py:minisoba" in note for note in done.json["notes"])
    Path("elsewhere").mkdir()
    shutil.move("mine.py", "elsewhere/mine.py")
    del sys.modules["mine"]
    assert "in a file that is not there" in coterie("resume", "r").err
    assert coterie("resume", "r", "--allow-code", "elsewhere/mine.py").code == 0


def test_code_that_is_typed_is_admitted_for_one_command_also_as_a_network(coterie: Command, tmp_path: Path) -> None:
    for first, name in enumerate(("a.csv", "b.csv", "own.csv")):
        lines = (f"{i % 7 + first / 10},{i % 5 + first / 10},{'ab'[i % 2]}\n" for i in range(20))
        (tmp_path / name).write_text("u,v,y\n" + "".join(lines))
    (tmp_path / "nets.py").write_text("from torch import nn\ndef net(shape, n):\n    return nn.Linear(shape[0], n)\n")
    words = {"clients": "?.csv", "target": "own.csv", "label": "y", "model": "nets.py:net"}
    sets = [word for key, value in words.items() for word in ("--set", f"problem.{key}={value}")]
    more = ("--method", "fedavg", "--set", "federation.mode=vmap", "--rounds", 1)
    done = coterie("run", "--problem", "files", *sets, *more, "--out", "r")
    assert done.code == 0, done.err
    assert f'model = "{tmp_path}/nets.py:net"' in (tmp_path / "r" / "config.toml").read_text()
    assert "--allow-code" in coterie("run", "r/config.toml", "--out", "s").err


def test_a_comparison_has_short_names_and_settings_by_them() -> None:
    names = ["mine.py:minisoba", "fednest"]
    common, own = _by_method({"minisoba.step": 0.2, "mine.py:minisoba.outer_step": 0.3, "run.rounds": 2}, names)
    assert common == {"run.rounds": 2}
    assert own == {"mine.py:minisoba": {"step": 0.2, "outer_step": 0.3}, "fednest": {}}
    with allowing(["mine.py"]):
        base = load(flags={"run.problem": "nested-quadratic", "problem.clients": 3})
        cases = plan(base, [plugins.canonical(name) for name in names], [0], {})
    assert [case.name for case in cases] == ["minisoba-0", "fednest-0"]
    assert cases[0].config.run.method == str(Path("mine.py").resolve()) + ":minisoba"


@pytest.mark.slow
def test_workers_of_compare_import_the_file_and_report_its_short_name(coterie: Command, tmp_path: Path) -> None:
    methods = ("--methods", "mine.py:minisoba,fednest", "--set", "minisoba.step=0.2", "--seeds", "0", "--jobs", 1)
    done = coterie("compare", *methods, *SMALL, "--out", "c", "--json")
    assert done.code == 0, done.err
    assert [row["method"] for row in done.json["rows"]] == ["minisoba", "fednest"]
    assert (tmp_path / "c" / "runs" / "minisoba-0" / "summary.json").is_file()
    assert "step = 0.2" in (tmp_path / "c" / "runs" / "minisoba-0" / "config.toml").read_text()


def test_a_registered_method_is_known_by_its_name(coterie: Command, site: Path) -> None:
    rows = {row["name"]: row for row in coterie("list", "methods", "--json").json}
    assert rows["minisoba"]["from"] == "coterie-soba 1.2"
    assert rows["minisoba"]["what"] == "of coterie-soba"
    assert rows["fednest"]["from"] == "coterie"
    assert "coterie_soba" not in sys.modules  # a list imports nothing
    done = coterie("list", "methods", "minisoba", "--json")
    assert done.json["paper"] == "Dagréou et al. 2022"
    assert done.json["from"] == "coterie-soba 1.2"
    Path("c.toml").write_text('[run]\nmethod = "minisoba"\n')  # installing is consent, also where a file names it
    assert coterie("run", "c.toml", *SMALL, "--out", "r").code == 0
    assert re.search(r'^minisoba = "coterie-soba 1.2, sha256 [0-9a-f]{64}"$', Path("r/config.toml").read_text(), re.M)
    assert method_entry("minisoba").grid["method.step"] == (0.05, 0.1, 0.2)


def test_names_that_two_packages_register_are_refused_and_coteries_own_stay(coterie: Command, site: Path) -> None:
    install(site, "other-soba", "other_soba", FACTORIES, methods="minisoba = other_soba:five\nfednest = other_soba:six")
    done = coterie("run", "--method", "minisoba", *SMALL)
    assert done.code == 2
    for word in (
        "coterie-soba 1.2 (coterie_soba:minisoba)",
        "other-soba 1.2 (other_soba:five)",
        "package.module:factory",
    ):
        assert word in done.err
    assert method_entry("fednest").source == "coterie"
    names = [row["name"] for row in coterie("list", "methods", "--json").json]
    assert [name for name in names if ":" in name] == ["other_soba:six", "coterie_soba:minisoba", "other_soba:five"]
    with allowing(["coterie_soba"]):
        assert method_entry("coterie_soba:minisoba").make().name == "minisoba"


def test_the_same_file_by_two_names_has_two_short_ones() -> None:
    assert plugins.labels(["a.py:minisoba", "/x/b.py:minisoba", "fednest"]) == {
        "a.py:minisoba": "a-minisoba",
        "/x/b.py:minisoba": "b-minisoba",
        "fednest": "fednest",
    }
    assert plugins.label("mine.py:two_lines") == "two-lines"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "bad.py:five"), ("five returned a int, no Method", "return Method(")),
        (("--method", "bad.py:six"), ("six returned a int, no Method",)),
        (("--method", "bad.py:failing"), ("bad.py:failing failed: KeyError", "bad.py:")),
        (("--method", "bad.py:untyped"), ("the setting step of untyped has no type", "Positive")),
        (("--method", "bad.py:positional"), ("takes step by position", "def positional(*, step")),
        (("--method", "bad.py:nothing"), ("bad has no 'nothing'",)),
        (("--method", "bad.py"), ("names a file", "bad.py:method")),
        (("--method", "missing.py:minisoba"), ("there is no file", "missing.py")),
        (("--method", "no_such_package.module:minisoba"), ("no_such_package.module cannot be imported",)),
        (("--method", "mine:minisoba"), ("The current folder is not searched", "mine.py:")),
        (("--method", "rival.py:minisoba"), ("rival.py failed: TypeError", "the family 'fednest' belongs to")),
        (("--problem", "bad.py:lines"), ("bad.py:lines returned a str, no Problem", "weighting(")),
        (("--problem", "nothing-like-it"), ("unknown problem",)),
        (("--engine", "cloud"), ("run.engine = 'cloud'", "'local'")),
    ],
    ids=lambda value: str(value[-1])[:30],
)
def test_what_cannot_be_used_is_named_before_the_first_round(
    coterie: Command, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    (tmp_path / "bad.py").write_text(FACTORIES)
    (tmp_path / "rival.py").write_text(SOBA.read_text().replace('"minisoba/directions"', '"fednest/directions"'))
    done = coterie("run", "--problem", "nested-quadratic", *arguments, "--out", "r")
    assert done.code == 2, done.out
    for word in words:
        assert word in done.err
    assert not (tmp_path / "r").exists()


def test_a_file_that_names_code_runs_nothing(coterie: Command, tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("from pathlib import Path\nPath('trace').write_text('it ran')\n")
    for table in ('method = "trap.py:x"', 'problem = "trap.py:x"', 'baselines = ["trap.py:x"]', 'method = "trap:x"'):
        (tmp_path / "c.toml").write_text(f"[run]\n{table}\n")
        for command in (("run", "c.toml"), ("tune", "c.toml"), ("compare", "c.toml")):
            done = coterie(*command)
            assert (done.code == 2 and "names code" in done.err) or command[0] == "compare", done.err
    assert not (tmp_path / "trace").exists()
    assert "trap" not in sys.modules


def test_a_node_uses_what_its_operator_has_admitted_and_nothing_else(site: Path) -> None:
    """Installing a package at a node is not enough: a server elsewhere names it."""
    config = load(flags={"run.method": "minisoba", "run.problem": "nested-quadratic"}, sets={"problem.clients": 3})
    for module in [name for name in sys.modules if name == "coterie_soba"]:
        del sys.modules[module]
    with pytest.raises(UsageError, match=r"coterie-soba 1.2.*admit coterie_soba on this machine"):
        read_config(config.as_toml())
    assert "coterie_soba" not in sys.modules
    with allowing(["coterie_soba"]):
        node = node_of(read_config(config.as_toml()), (1,))
    assert node.names.work("minisoba/directions").__name__ == "directions"
    with pytest.raises(UsageError, match=r"is code of .*mine\.py"):
        read_config('[run]\nmethod = "mine.py:minisoba"\nproblem = "nested-quadratic"\n')


def test_a_node_of_own_rows_takes_a_file_with_works(tmp_path: Path) -> None:
    rows = (torch.randn(4, 2), torch.zeros(4).long())
    data = ClientData(rows, torch.nn.Linear(2, 2), "cross_entropy")
    node = load_node(lambda: data, client=0, memory=None, modules=("mine.py",))
    assert node.names.work("minisoba/directions").__module__ == "mine"
    with pytest.raises(CodecError, match="not among the modules"):
        load_node(lambda: data, client=0, memory=None).names.work("minisoba/directions")


def test_a_problem_of_a_file_is_measured_and_its_settings_are_checked(coterie: Command, tmp_path: Path) -> None:
    (tmp_path / "lines.py").write_text(
        """
import torch
from coterie.problems import Context, weighting
from coterie.problems.models import FlatModel
from coterie.settings import Count

def two_lines(context: Context, *, clients: Count = 4):
    '''Regression; half of the clients have the target's slope.'''
    make = torch.Generator().manual_seed(context.seed)

    def rows(n, slope):
        x = torch.randn(n, 1, generator=make)
        return x, slope * x.squeeze(-1)

    shards = [rows(9, 2.0 if k < clients // 2 else -2.0) for k in range(clients)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.seed)
        model = FlatModel(torch.nn.Linear(1, 1))
    return weighting(shards, rows(9, 2.0), model, "squared", dtype=context.dtype, device=context.device)
"""
    )
    problem = ("--problem", "lines.py:two_lines", "--set", "federation.mode=vmap")
    done = coterie("run", "--method", "meritfed", *problem, "--rounds", 2, "--set", "problem.clients=2", "--out", "r")
    assert done.code == 0, done.err
    assert "problem.clients" in coterie("run", *problem, "--set", "problem.clients=0", "--out", "s").err
    listed = coterie("list", "problems", "lines.py:two_lines", "--json").json
    assert listed["from"] == str(tmp_path / "lines.py")
    assert listed["what"].startswith("Regression")
    with allowing(["lines.py"]):
        check_problem(problem_entry("lines.py:two_lines").make)


def test_an_engine_that_a_package_registers_is_started(coterie: Command, site: Path) -> None:
    text = "def launch(config, folder, watch, **options):\n    raise SystemExit(1)\n"
    install(site, "coterie-moon", "coterie_moon", text, engines="moon = coterie_moon:launch")
    assert {"name": "moon", "from": "coterie-moon 1.2", "what": "of coterie-moon"} in coterie(
        "list", "engines", "--json"
    ).json
    assert coterie("run", "--engine", "moon", "--out", "r").code == 1
    assert "coterie_moon" in sys.modules
    assert resolve({"run": {"engine": "moon"}}).run.engine == "moon"


def test_no_own_name_is_the_name_of_code() -> None:
    assert not any(plugins.is_code(entry.name) for entry in (*METHODS, *PROBLEMS))


def test_a_problem_without_a_context_and_a_name_that_is_not_there_are_explained(
    coterie: Command, tmp_path: Path
) -> None:
    (tmp_path / "unusual.py").write_text("def load(*, rows: int = 3):\n    return None\n")
    assert "must be the Context" in coterie("run", "--problem", "unusual.py:load", "--method", "fedavg").err
    assert "unusual has no 'nope'. It defines load." in coterie("run", "--problem", "unusual.py:nope").err
