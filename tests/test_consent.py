"""Code by consent: a file that names code does not run it, whoever reads the file."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import coterie as package
from coterie.consent import VARIABLE, admitted, allow_code, allowing, check_address, resolve
from coterie.errors import UsageError
from coterie.experiment.predict import load_model

Command = Callable[..., Any]
SOURCE = Path(package.__file__).parent
LOUD = "from pathlib import Path\nPath({trace!r}).write_text('it ran')\n"
NETWORK = "from torch import nn\ndef net(shape, outputs):\n    return nn.Linear(shape[0], outputs)\n"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No consent from outside, a working directory of its own, and no module of another test."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def trap(tmp_path: Path) -> tuple[str, Path]:
    """A module in the working directory that leaves a trace when it is imported, and makes a network."""
    trace = tmp_path / "trace"
    (tmp_path / "trap.py").write_text(LOUD.format(trace=str(trace)) + NETWORK)
    return "trap:net", trace


def model_folder(folder: Path, **changes: Any) -> Path:
    """A stored model of two numbers and two classes, as `coterie run` writes it, with something changed."""
    folder.mkdir(exist_ok=True)
    columns = [{"name": name, "mean": 0.0, "deviation": 1.0, "indicator": False} for name in "uv"]
    stored = {"version": 1, "label": "y", "kind": "classification", "numeric": columns, "categorical": []}
    stored |= {"image": None, "classes": ["a", "b"], "class_counts": [1, 1], "label_mean": 0.0, "label_deviation": 1.0}
    stored |= {"model": {"name": "logistic", "shape": [2], "outputs": 2}}
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        table = stored
        for key in path:
            table = table[key]
        table[last] = value
    (folder / "preprocess.json").write_text(json.dumps(stored))
    save_file({"1.weight": torch.ones(2, 2), "1.bias": torch.zeros(2)}, folder / "model.safetensors")
    return folder


def write_tables(folder: Path) -> None:
    (folder / "sites").mkdir()
    for first, name in enumerate(("sites/a.csv", "sites/b.csv", "mine.csv")):
        lines = (f"{i % 7 + first / 10},{i % 5 + first / 10},{'ab'[i % 2]}\n" for i in range(30))
        (folder / name).write_text("u,v,y\n" + "".join(lines))


CONFIG = """[run]
problem = "files"
rounds = 1
baselines = []
[problem]
clients = "sites/*.csv"
target = "mine.csv"
label = "y"
"""


def test_a_model_folder_runs_nothing_that_it_names(coterie: Command, tmp_path: Path, trap: tuple[str, Path]) -> None:
    name, trace = trap
    (tmp_path / "rows.csv").write_text("u,v\n1,2\n")
    for evil in ("subprocess:Popen", "os:system", "posix:system", name, "trap.py:net", f"{tmp_path}/trap.py:net"):
        done = coterie("predict", model_folder(tmp_path / "model", model__name=evil), "rows.csv")
        assert done.code == 2
        assert "problem.model" in done.err
        assert "--allow-code" in done.err
    assert not trace.exists()
    assert "trap" not in sys.modules


@pytest.mark.parametrize("setting", ["model", "loss"])
@pytest.mark.parametrize("command", ["run", "advise", "compare", "resume"])
def test_a_configuration_runs_nothing_that_it_names(
    coterie: Command, tmp_path: Path, trap: tuple[str, Path], command: str, setting: str
) -> None:
    write_tables(tmp_path)
    folder = tmp_path / "sent"
    folder.mkdir()
    (folder / "config.toml").write_text(f'{CONFIG}{setting} = "{trap[0]}"\n')
    given = folder if command == "resume" else folder / "config.toml"
    done = coterie(command, given)
    assert done.code == 2, done.err
    if command == "advise":  # which has models of its own
        assert f"problem.{setting} = 'trap:net'" in done.err
    else:
        assert f"problem.{setting} = 'trap:net' names code" in done.err
        assert "--allow-code ./trap.py" in done.err
    assert not trap[1].exists()


def test_consent_is_for_one_command_and_its_baselines(coterie: Command, tmp_path: Path, trap: tuple[str, Path]) -> None:
    write_tables(tmp_path)
    (tmp_path / "c.toml").write_text(CONFIG.replace("[]", '["fedavg"]') + 'model = "trap:net"\n')
    done = coterie("run", "c.toml", "--allow-code", "./trap.py", "--out", "r")
    assert done.code == 0, done.err
    assert trap[1].exists()
    assert VARIABLE not in os.environ
    assert "names code" in coterie("run", "c.toml", "--out", "r2").err


def test_the_current_folder_is_not_searched(coterie: Command, tmp_path: Path, trap: tuple[str, Path]) -> None:
    write_tables(tmp_path)
    (tmp_path / "c.toml").write_text(CONFIG + 'model = "trap:net"\n')
    done = coterie("run", "c.toml", "--allow-code", "trap", "--out", "r")
    assert "trap cannot be imported" in done.err
    assert "admit the file by --allow-code ./trap.py" in done.err
    # Python itself puts it on the path of `python -m`
    (tmp_path / "typer.py").write_text("raise SystemExit('a file of the current folder ran')")
    command = [sys.executable, "-m", "coterie", "predict", str(model_folder(tmp_path / "m")), "--allow-code"]
    ran = subprocess.run([*command, "no such module"], capture_output=True, text=True)
    assert "is neither the name of a module" in ran.stderr
    assert not trap[1].exists()


def test_worker_processes_inherit_consent_and_nothing_of_the_current_folder(
    coterie: Command, tmp_path: Path, trap: tuple[str, Path]
) -> None:
    write_tables(tmp_path)
    (tmp_path / "c.toml").write_text(CONFIG + 'model = "trap:net"\n')
    (tmp_path / "tomllib.py").write_text("raise SystemExit('a file of the current folder ran')")
    grid = ("--grid", "method.step=0.1", "--rounds", 1, "--jobs", 1)
    done = coterie("tune", "c.toml", *grid, "--allow-code", "./trap.py", "--out", "t")
    assert done.code == 0, done.err
    assert trap[1].exists()


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("mine", "no name of code"),
        ("mine:", "no name of code"),
        (":net", "no name of code"),
        ("mine:net()", "no name of code"),
        ("mine:a.b", "no name of code"),
        ("..mine:net", "no name of code"),
        ("mine net:x", "no name of code"),
        ("minor:net", "names code"),
        ("mine.py:net", "names code"),
        ("collections.abc:Iterator\x1b[2J", "no name of code"),
    ],
)
def test_names_that_are_none_or_not_admitted(name: str, word: str) -> None:
    with pytest.raises(UsageError, match=word) as error:
        resolve(name, "problem.model", ["mine"])
    assert "\x1b" not in str(error.value)


def test_only_what_a_module_itself_defines(tmp_path: Path) -> None:
    text = "from os import system\nfrom torch.nn import Linear\nimport os\nfour = 4\n"
    (tmp_path / "mine.py").write_text(f"{text}def own(): return 5\nclass Own: pass\n")
    entries = [str(tmp_path / "mine.py")]
    assert resolve("mine:own", "here", entries)() == 5
    assert resolve("mine.py:own", "here", entries)() == 5
    assert resolve("mine:Own", "here", entries).__name__ == "Own"
    for attribute, word in (("system", "comes from posix"), ("Linear", "comes from torch"), ("four", "not a function")):
        with pytest.raises(UsageError, match=word):
            resolve(f"mine:{attribute}", "here", entries)
    for attribute in ("os", "nothing", "__builtins__"):
        with pytest.raises(UsageError, match=r"has no|not a function"):
            resolve(f"mine:{attribute}", "here", entries)


def test_a_package_admits_its_modules_and_nothing_that_only_begins_like_it() -> None:
    assert resolve("email.message:Message", "here", ["email"]).__name__ == "Message"
    with pytest.raises(UsageError, match="names code"):
        resolve("emails:x", "here", ["email"])
    with pytest.raises(UsageError, match="names code"):
        resolve("email:x", "here", ["email.message"])


def test_a_file_that_fails_leaves_nothing_behind_and_shadows_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import sys\nraise RuntimeError('no')")
    before = list(sys.path)
    with pytest.raises(UsageError, match="importing bad failed: RuntimeError: no"):
        resolve("bad:x", "here", [str(tmp_path / "bad.py")])
    assert sys.path == before
    assert "bad" not in sys.modules
    (tmp_path / "json.py").write_text("x = 1")
    with pytest.raises(UsageError, match="another module is called json"):
        resolve("json:x", "here", [str(tmp_path / "json.py")])


def test_python_admits_and_a_with_statement_forgets() -> None:
    with allowing(["email"]):
        assert "email" in admitted()
        allow_code("json.decoder")
        assert {"email", "json.decoder"} <= admitted()
    assert not admitted()
    for bad in ("no module", "-m", "missing.py", "a\nb"):
        with pytest.raises(UsageError, match="--allow-code"):
            allow_code(bad)


def test_the_users_own_configuration_admits_if_it_is_the_users(tmp_path: Path) -> None:
    path = tmp_path / "home" / "coterie" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text('[code]\nallow = ["email"]\n')
    path.chmod(0o600)
    assert resolve("email.message:Message", "here").__name__ == "Message"
    path.chmod(0o666)
    with pytest.raises(UsageError, match="nobody else can write"):
        admitted()
    path.chmod(0o600)
    for text in ("[code", "code = 3", "[code]\nallow = 'email'", "[code]\nallow = [3]", "[code]\nadmit = []"):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"config\.toml"):
            admitted()


def test_a_cluster_that_only_a_file_names_is_not_joined() -> None:
    for own in ("auto", "127.0.0.1:6379", "ray://localhost:10001"):
        check_address(own, "engine.address")
    for other in ("ray://evil.example:10001", "10.0.0.5:6379", "localhost.evil.example:1", "auto\n"):
        with pytest.raises(UsageError, match="could run code"):
            check_address(other, "engine.address")
    with allowing(["10.0.0.5:6379"]):
        check_address("10.0.0.5:6379", "engine.address")


def test_a_flare_job_names_its_own_files_or_needs_consent_at_the_site(
    tmp_path: Path, trap: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.engines.nvflare.compute import _node

    settings: dict[str, Any] = {"memory": None, "client": 0, "site": "true", "modules": [], "shares_memory": False}
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("subprocess:Popen", trap[0]):
        with pytest.raises(UsageError, match="names code"):
            _node({**settings, "load": name})
    assert not trap[1].exists()
    (tmp_path / "custom").mkdir()
    text = "from coterie.federation.remote import Node\ndef load(site): return Node(None, (0,))\n"
    (tmp_path / "custom" / "job_data.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "custom"))
    assert type(_node({**settings, "load": "job_data:load"})).__name__ == "Node"


BAD_MODELS: list[tuple[dict[str, Any], str]] = [
    ({"model__shape": [10**12]}, "model.shape"),
    ({"model__shape": [2**20, 2**20, 2**20]}, "do not fit"),
    ({"model__shape": "22"}, "model.shape"),
    ({"model__outputs": -1}, "model.outputs"),
    ({"model__outputs": 10**6}, "do not fit"),
    ({"model__name": 5}, "model.name"),
    ({"model__name": "mlp"}, "by its architecture"),
    ({"model__name": "resnet18"}, "needs images"),
    ({"numeric": 5}, "numeric"),
    ({"numeric": [{"name": "u"}]}, "numeric"),
    ({"classes": ["a", "b", "c"]}, "do not fit"),
    ({"classes": "ab", "class_counts": None}, "classes"),
    ({"image": {"shape": [1, 10**9, 10**9], "unit": 1.0}}, "image.shape"),
    ({"image": {"shape": [1, 2**20, 2**20], "unit": 1.0}, "model__shape": [1, 2**20, 2**20]}, "do not fit"),
    ({"label_mean": "x\x1b[2J"}, "label_mean"),
]


@pytest.mark.parametrize(("changes", "word"), BAD_MODELS, ids=lambda value: str(value)[:40])
def test_a_stored_model_is_checked_before_memory_is_taken(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word) as error:
        load_model(model_folder(tmp_path / "m", **changes))
    assert "\x1b" not in str(error.value)


def test_a_stored_model_that_is_sound_or_nested_or_lacks_parameters(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    net, prepared = load_model(folder)
    assert prepared.classes == ("a", "b")
    assert torch.equal(net(torch.tensor([[1.0, 2.0]])), torch.tensor([[3.0, 3.0]]))
    for tensors in ({"1.weight": torch.ones(2, 2)}, {"client_0.1.weight": torch.ones(2, 2)}):
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(UsageError, match="damaged"):
            load_model(folder)
    (folder / "preprocess.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match="damaged"):
        load_model(folder)


# where a name that is not written in the source is imported: the two resolvers, and tables of the source itself
RESOLVERS = {"consent.py", "federation/naming.py", "federation/remote/codec.py"}
COMPILERS = {"numerics/compile_graph.py"}  # runs the text of a graph that its parent process recorded
REGISTRIES = {"methods/__init__.py", "methods/registry.py", "problems/catalogue/registry.py", "plugins.py"}
TABLES = {"__init__.py", "engines/flower/__init__.py", "cli/engines.py"} | REGISTRIES
BY_CONSTANT = {"experiment/loggers.py": "_package", "problems/files/reading.py": "extra"}
IMPORTERS = {"import_module", "__import__", "exec", "eval", "run_module", "run_path", "spec_from_file_location"}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None)  # model.eval() is none of these
            if isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in ("importlib", "runpy"):
                name = node.func.attr
            yield name or "", node


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_nothing_imports_a_name_that_comes_from_data(path: Path) -> None:
    place = path.relative_to(SOURCE).as_posix()
    wrapper = BY_CONSTANT.get(place)
    for name, call in calls(ast.parse(path.read_text())):
        constant = bool(call.args) and isinstance(call.args[0], ast.Constant)
        if name in IMPORTERS and not constant:
            known = place in RESOLVERS | TABLES | COMPILERS or wrapper is not None
            assert known, f"{place}:{call.lineno} imports a name"
        if wrapper is not None and name == wrapper:
            assert constant, f"{place}:{call.lineno} imports a name that is not written there"


def test_the_walk_sees_every_kind_of_import() -> None:
    text = "import_module(x)\nimportlib.import_module(x)\n__import__(x)\neval(x)\nnet.eval()\nrunpy.run_path(x)"
    found = [name for name, _ in calls(ast.parse(text))]
    assert [name for name in found if name in IMPORTERS] == [
        *("import_module", "import_module", "__import__", "eval"),
        "run_path",
    ]
