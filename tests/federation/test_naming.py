"""Names of works: stable, unique, found by one resolver, and nothing is imported that is not admitted."""

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.federation import RESULT, Call, Each, LocalEngine, Static, moved_from, naming, pack, work
from coterie.federation.naming import FAMILIES, STABLE, UnknownWork, find, home_of
from coterie.federation.remote import PERMISSIVE, Names, Node
from coterie.federation.remote.codec import CodecError, decode, encode
from coterie.federation.remote.messages import PROTOCOL, Order, Step
from coterie.federation.work import info_of, name_of
from coterie.numerics import Draw

SOURCE = Path(coterie.__file__).parent
DRAW = Draw.of(3)


@work("mine/moved-steps", update=moved_from("y"))
def moved_steps(shard: Any, shared: Any, private: Any, static: Any, draw: Any) -> Any:
    return shared["y"] + 0.1 * shard.train.all().inputs[0]


@work
def bare(shard: Any, shared: Any, private: Any, static: Any, draw: Any) -> Any:
    return shared


@work("mine/two-parts", update=(moved_from(1), None))
def two_parts(shard: Any, shared: Any, private: Any, static: Any, draw: Any) -> Any:
    return shared[1] + 1.0, shared[0].sum()


def decorated() -> list[tuple[str, str, ast.expr]]:
    """Module, function and decorator of every work in the source."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(("coterie", *path.relative_to(SOURCE).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in getattr(node, "decorator_list", []) if isinstance(node, ast.FunctionDef) else []:
                called = mark.func if isinstance(mark, ast.Call) else mark
                if isinstance(called, ast.Name) and called.id == "work":
                    found.append((module, node.name, mark))
    return found


def test_every_work_of_coterie_states_its_name_and_its_update() -> None:
    works = decorated()
    names = []
    for module, function, mark in works:
        assert isinstance(mark, ast.Call), f"{module}:{function}"
        assert any(keyword.arg == "update" for keyword in mark.keywords), f"{module}:{function} states no update"
        (name,) = (argument.value for argument in mark.args if isinstance(argument, ast.Constant))
        assert STABLE.fullmatch(name), name
        assert home_of(name.partition("/")[0]) == module, name
        assert find(name) is getattr(import_module(module), function)
        names.append(name)
    assert len(set(names)) == len(names)
    assert set(FAMILIES.values()) <= {module for module, _, _ in works}


def test_ones_own_works() -> None:
    assert (name_of(bare), info_of(bare).update) == (f"{__name__}:bare", RESULT)
    assert find("mine/moved-steps") is moved_steps
    for name, function in (("mine/moved-steps", moved_steps), (f"{__name__}:bare", bare)):
        with pytest.raises(CodecError, match="not among the modules that are admitted"):
            Names().work(name)
        assert Names().with_modules(__name__).work(name) is function


@pytest.mark.parametrize(
    "name", ["os:system", "antigravity:x", "files/column-moments", "no-family/steps", "a/b/c", "../x", "Shared/x", ""]
)
def test_a_name_that_is_not_admitted_leads_to_no_import(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(naming, "import_module", lambda module: asked.append(module))
    with pytest.raises(CodecError):
        Names().work(name)
    with pytest.raises(CodecError):
        Static(decode=name).resolved_by(Names().work).work("decode")
    assert asked == []


def test_the_operators_own_modules_are_asked_for_names_without_a_known_family() -> None:
    with pytest.raises(CodecError, match="there is no hospitals_that_are_not_here"):
        Names().with_modules("hospitals_that_are_not_here").work("hospital/steps")


@pytest.mark.parametrize("setting", ["decode", "encode"])
def test_a_node_refuses_works_that_a_setting_names(setting: str) -> None:
    """A server could name any module here; it was imported past the list of admitted ones."""
    engine = LocalEngine(Task(), pack([(torch.ones(2, 3), torch.ones(2))]), None, None)
    node = Node(engine, (0,), policy=PERMISSIVE)
    static = {"decode": "fedsep/sketch-encode", "encode": "fedsep/sketch-encode", setting: "antigravity:geohash"}
    step = Step("two-layer/client-round", static, int(DRAW.key), torch.ones(3), None, False)
    if setting == "encode":
        step = step._replace(static={**static, "decode": f"{__name__}:bare", "step": 0.1, "steps": 1, "batch": "all"})
        node.names = Names().with_modules(__name__)
    reply = decode(node.handle(encode(Order(PROTOCOL, 1, "run", "r", (0,), step, ((),)))), Names())
    assert reply.content.kind == "refused"
    assert "antigravity is not among the modules that are admitted here" in reply.content.reason
    assert "antigravity" not in sys.modules


class Task:
    """Oracles of which nothing is asked but a gradient."""

    vmaps, mixes_rows, dropout = True, False, False

    def full_gradient(self, theta: Any, rows: Any) -> Any:
        return theta


def test_names_are_unique_well_formed_and_of_ones_own_family() -> None:
    with pytest.raises(TypeError, match="rename one"):
        naming.register("mine/two-parts", Task.full_gradient)
    with pytest.raises(TypeError, match="lowercase with hyphens"):
        work("Mine/Steps", update=RESULT)(bare)
    with pytest.raises(TypeError, match="belongs to coterie"):
        work("shared/better-gradient", update=RESULT)(bare)
    with pytest.raises(UnknownWork, match="not of the form"):
        find("nonsense")
    assert find("mine/two-parts") is two_parts


IDS = torch.tensor([0, 2])


def test_updates_are_counted_from_the_declared_leaf() -> None:
    x, y = torch.tensor([5.0, 6.0, 7.0]), Each(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    call = Call(two_parts, (x, y), None, Static(), DRAW)
    values = (torch.tensor([[1.5, 2.0], [5.0, 7.0]]), torch.tensor([18.0, torch.inf]))
    moved, report = call.updates(IDS, values)
    assert moved.tolist() == [[0.5, 0.0], [0.0, 1.0]]
    assert report[0] == 0.0  # no update, so it has no length …
    assert report[1].isnan()  # … but screening sees that it is not finite
    assert call.updates(IDS, values, reports=True)[1] is values[1]
    back, none = call.results(IDS, (moved, report))
    assert torch.equal(back, values[0])
    assert none is None


def test_a_declaration_that_does_not_fit_is_explained() -> None:
    call = Call(two_parts, (torch.ones(2), None), None, Static(), DRAW)
    with pytest.raises(TypeError, match="mine/two-parts declares the updates of 2 values"):
        call.updates(IDS, torch.ones(2, 2))
    with pytest.raises(TypeError, match="is a NoneType, no tensor"):
        call.updates(IDS, (torch.ones(2, 2), torch.ones(2)))


def test_what_a_stage_leaves_alone_keeps_every_bit() -> None:
    start = torch.tensor([1e8, 1.0, -3.0, 0.0])
    call = Call(moved_steps, {"y": start}, None, Static(), DRAW)
    values = torch.tensor([[1.0, 1e-8, -3.0, -0.0], [0.1, 0.7, 1e8, 1e-30]])
    assert not torch.equal(start + (values - start), values)  # the plain way back loses digits
    for stage in (lambda leaves: leaves, lambda leaves: [leaf * 1.0 + 0.0 for leaf in leaves]):
        kept = call.changed(IDS, values, stage)
        assert torch.equal(kept.view(torch.int32), values.view(torch.int32))
    halved = call.changed(IDS, values, lambda leaves: [torch.where(leaf > 0, 0.5 * leaf, leaf) for leaf in leaves])
    rising = values > start
    assert torch.equal(halved[~rising], values[~rising])
    torch.testing.assert_close(halved[rising], (start + 0.5 * (values - start))[rising])
