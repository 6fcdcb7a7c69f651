"""Configuration: which source wins, what is refused and how, and that config.toml gives the same run again."""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import VERSION, load, parse_sets, resolve
from coterie.methods.registry import METHODS, method_entry
from coterie.problems.catalogue.registry import PROBLEMS, problem_entry
from coterie.settings import checked


def written(folder: Path, text: str) -> Path:
    file = folder / "some.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_nothing_given_is_the_default_run() -> None:
    config = load()
    assert (config.run.method, config.run.problem, config.run.rounds, config.run.seed) == (
        "meritfed",
        "friends",
        200,
        0,
    )
    assert (config.problem["data"], config.problem["clients"], config.problem["friends"]) == ("digits", 15, 5)
    assert config.run.baselines == ["local-train", "fedavg"]


def test_later_sources_win(tmp_path: Path) -> None:
    plain = checked(method_entry("meritfed").make, "method", {})["step"]
    tuned = problem_entry("friends").tuned["meritfed"]["step"]
    assert plain != tuned
    assert load(sets={"run.problem": "quadratic"}).method["step"] == plain
    assert load().method["step"] == tuned
    file = written(tmp_path, "[run]\nrounds = 7\nseed = 3\n[method]\nstep = 0.25\nmirror_steps = 4\n")
    assert load(file).method["step"] == 0.25
    assert load(file).method["mirror_step"] == problem_entry("friends").tuned["meritfed"]["mirror_step"]
    sets = {"method.step": 0.5, "run.rounds": 8}
    assert load(file, sets).method["step"] == 0.5
    assert load(file, sets).method["mirror_steps"] == 4
    both = load(file, sets, {"run.rounds": 9})
    assert (both.run.rounds, both.run.seed, both.method["step"]) == (9, 3, 0.5)


def test_settings_of_one_method_do_not_leak_into_its_baselines() -> None:
    config = load(sets={"method.step": 0.3})
    assert config.for_baseline("fedavg").method == checked(method_entry("fedavg").make, "method", {})
    assert config.for_baseline("fedavg").run.baselines == []
    assert config.for_baseline("fedavg").problem == config.problem


@pytest.mark.parametrize(
    ("file", "sets", "expected"),
    [
        ("[problem]\nactive = 0.5\n", {}, 0.5),
        ("[federation]\nactive = 0.5\n", {"problem.active": 0.25}, 0.25),
        ("[problem]\nactive = 0.5\n", {"federation.active": 0.25}, 0.25),
        ("[problem]\nactive = 0.5\n[federation]\nactive = 0.75\n", {}, 0.75),
        ("", {"problem.active": 0.1}, 0.1),
    ],
)
def test_the_alias_of_participation_keeps_the_order_of_sources(
    tmp_path: Path, file: str, sets: dict[str, Any], expected: float
) -> None:
    config = load(written(tmp_path, file), sets)
    assert config.federation.active == expected
    assert "active" not in config.problem


def test_values_of_set_are_toml_or_else_text() -> None:
    pairs = [
        "run.rounds=5",
        "method.batch=all",
        'method.mirror="smd"',
        "run.baselines=['fedavg']",
        "method.step = 1e-2",
        "method.cap=.5",
        "method.outer_step=-5.e-3",
        "problem.target=.csv",
    ]
    assert parse_sets(pairs) == {
        "run.rounds": 5,
        "method.batch": "all",
        "method.mirror": "smd",
        "run.baselines": ["fedavg"],
        "method.step": 0.01,
        "method.cap": 0.5,
        "method.outer_step": -0.005,
        "problem.target": ".csv",
    }
    with pytest.raises(UsageError, match="no '='"):
        parse_sets(["run.rounds"])


def test_config_toml_gives_the_same_configuration_again(tmp_path: Path) -> None:
    """Also every number to its last digit, and what was chosen by measurement is not chosen again."""
    sets = {"method.step": 0.1 + 0.2, "federation.norm": 1e300, "federation.target": 1, "problem.clients": 4}
    config = assemble(load(sets={**sets, "run.problem": "quadratic"}, flags={"run.rounds": 3})).config
    assert config.federation.mode in ("vmap", "sequential")
    assert config.federation.chunk == 4
    assert config.run.threads != "auto"
    again = load(written(tmp_path, config.as_toml()))
    assert again == config
    assert again.as_toml() == config.as_toml()
    assert assemble(again).config == config


def assert_round_trip(folder: Path, method: str, problem: str) -> None:
    config = resolve({"run": {"method": method, "problem": problem}})
    assert load(written(folder, config.as_toml())) == config


assert len(METHODS) >= len(PROBLEMS)


@pytest.mark.parametrize(("method", "problem"), [(m.name, p.name) for m, p in zip(METHODS, cycle(PROBLEMS))])
def test_every_default_survives_the_round_trip(tmp_path: Path, method: str, problem: str) -> None:
    """Of every method and of every problem."""
    assert_round_trip(tmp_path, method, problem)


@pytest.mark.slow
@pytest.mark.parametrize("method", [m.name for m in METHODS])
def test_every_pair_of_defaults_survives_the_round_trip(tmp_path: Path, method: str) -> None:
    for problem in PROBLEMS:
        assert_round_trip(tmp_path, method, problem.name)


@pytest.mark.parametrize(
    ("sets", "complaint"),
    [
        ({"run.method": "merritfed"}, "unknown method 'merritfed'; did you mean meritfed"),
        ({"run.method": "zzz"}, "unknown method 'zzz'; known: .*fedavg.*meritfed"),
        ({"run.problem": "friend"}, "unknown problem 'friend'; did you mean friends"),
        ({"run.baselines": ["fedavgg"]}, "unknown method 'fedavgg'; did you mean fedavg"),
        ({"run.round": 3}, r"unknown key in \[run\] 'round'; did you mean rounds"),
        ({"method.stepp": 3}, r"unknown key in \[method\] 'stepp'; did you mean step"),
        ({"problem.client": 3}, r"unknown key in \[problem\] 'client'; did you mean clients"),
        ({"federation.activ": 0.5}, r"unknown key in \[federation\] 'activ'; did you mean active"),
        ({"methods.step": 3}, "unknown table 'methods'; did you mean method"),
        ({"step": 3}, "'step' names no setting; write table.key=value"),
        ({"problem.data": "digit"}, "'digit'.*digits"),
        ({"run.rounds": "many"}, "run.rounds = 'many': .*integer"),
        ({"run.rounds": "5"}, "run.rounds = '5': .*integer"),
        ({"run.rounds": True}, "run.rounds = True: .*integer"),
        ({"run.rounds": 2.5}, "run.rounds = 2.5: .*integer"),
        ({"run.rounds": [1]}, r"run.rounds = \[1\]: .*integer"),
        ({"method.step": "fast"}, "method.step = 'fast': .*number"),
        ({"problem.clients": "five"}, "problem.clients = 'five': .*integer"),
        ({"federation.active": True}, "federation.active = True: .*number"),
        ({"run.rounds": 0}, "run.rounds = 0: .*greater than or equal to 1"),
        ({"run.seed": -1}, "run.seed = -1: .*greater than or equal to 0"),
        ({"run.seed": 2**63}, "run.seed = .*less than"),
        ({"method.step": -1.0}, "method.step = -1.0: .*greater than 0"),
        ({"method.step": float("nan")}, "method.step = nan: "),
        ({"method.step": float("inf")}, "method.step = inf: "),
        ({"federation.active": 0.0}, "federation.active = 0.0: .*greater than 0"),
        ({"federation.active": 1.5}, "federation.active = 1.5: .*less than or equal to 1"),
        ({"federation.chunk": 0}, "federation.chunk = 0: .*greater than or equal to 1"),
        ({"run.dtype": "float16"}, "run.dtype = 'float16': .*'float32' or 'float64'"),
        ({"run.engine": "remote"}, "run.engine = 'remote': .*'local'"),
    ],
)
def test_bad_settings_are_named_with_the_remedy(sets: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as error:
        load(sets=sets)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("version = 2\n", f"version 2; this coterie reads up to {VERSION}. Install a newer one"),
        ('version = "1.0"\n', "configuration version '1.0'"),
        ("[run\n", "not valid TOML"),
        ("[run]\nrounds = \n", "not valid TOML"),
        ("[run]\nrounds = 1\nrounds = 2\n", "not valid TOML"),
        ("rounds = 5\n", r"rounds stands outside of any table; put it below one of \[run\]"),
        ("run = 5\n", r"run must be a table, \[run\], not 5"),
        ("[rum]\nrounds = 5\n", "unknown table 'rum'; did you mean run"),
        ("[run]\nronds = 5\n", "unknown key in .run. 'ronds'; did you mean rounds"),
        ("[[run]]\nrounds = 5\n", "run must be a table"),
    ],
)
def test_bad_files_are_named_with_the_remedy(tmp_path: Path, text: str, complaint: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(UsageError, match=complaint) as error:
        load(file)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no configuration file"):
        load(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="is a folder"):
        load(tmp_path)
    (tmp_path / "latin.toml").write_bytes("# naïve\n".encode("latin-1"))
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "latin.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "latin.toml" / "below.toml")


@pytest.mark.parametrize(
    ("sets", "complaint"),
    [
        ({"federation.target": 9}, "federation.target is client 9, but there are clients 0 … 5 only"),
        ({"federation.count": 7}, "federation.count = 7 exceeds the 6 clients"),
        ({"problem.friends": 9}, "problem.friends is 9, but there are only 6 clients"),
        ({"run.device": "tpu"}, "run.device 'tpu' is none of cpu"),
        ({"run.device": "cpu:x"}, "run.device 'cpu:x' is none of cpu"),
        ({"run.device": "cuda:99"}, "run.device cuda:99 is not available here; set run.device=cpu"),
    ],
)
def test_settings_that_do_not_fit_the_problem(sets: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        assemble(load(sets={"run.problem": "quadratic", **sets}))
