"""Client memory: it changes at those who answer, and server code cannot look inside."""

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie.methods
from coterie.errors import PlacementError
from coterie.federation import Federation, Memory, work
from coterie.numerics import Draw

DRAW = Draw.of(0)
MODES = ["vmap", "sequential"]


@work
def count_up(shard, shared, private, static, draw):
    """Answers with what it remembers, and remembers more: by its own number, and by one."""
    own = shard.train.all().inputs[0]
    return private["sum"], {"sum": private["sum"] + own, "calls": (private["calls"][0] + 1,)}


@work
def forget_unless_fine(shard, shared, private, static, draw):
    """Client 1 answers with NaN."""
    own = shard.train.all().inputs[0]
    return torch.where(own == 1.0, torch.nan, own), private + 1.0


def blank(n: int) -> Memory:
    return Memory.start({"sum": torch.zeros(1), "calls": (torch.tensor(0),)}, n)


def active(fed: Federation, *ids: int) -> Federation:
    return replace(fed, ids=torch.tensor(ids))


def look(memory: Memory) -> tuple[list[float], list[int]]:
    inside = memory.payload
    return inside["sum"].flatten().tolist(), inside["calls"][0].tolist()


def test_everybody_starts_with_the_same():
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    rows = Memory.start(value, 5).payload
    assert rows.shape == (5, 2, 2)
    assert all(torch.equal(row, value) for row in rows)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("verb", ["mean", "gather"])
def test_only_those_who_are_asked_change_theirs(tiny, mode, chunk, verb):
    fed, memory = tiny(5, mode=mode, chunk=chunk), blank(5)
    for ids in [(1, 3, 4), (0, 3), (0, 1, 2, 3, 4)]:
        _, memory = getattr(active(fed, *ids), verb)(count_up, memory=memory, draw=DRAW)
    assert look(memory) == ([0.0, 2.0, 2.0, 9.0, 8.0], [2, 2, 1, 3, 2])


def test_a_work_sees_its_own_rows(tiny):
    fed, memory = tiny(5), blank(5)
    _, memory = active(fed, 2, 4).gather(count_up, memory=memory, draw=DRAW)
    gathered, _ = fed.gather(count_up, memory=memory, draw=DRAW)
    assert gathered.rows.flatten().tolist() == [0.0, 0.0, 2.0, 0.0, 4.0]
    mean, _ = fed.mean(count_up, memory=memory, weights=torch.arange(5.0), draw=DRAW)
    assert mean.item() == pytest.approx((2 * 2 + 4 * 4) / 10)


def test_the_old_memory_is_as_it_was(tiny):
    old = blank(5)
    for ids in [(1, 3), (0, 1, 2, 3, 4)]:
        active(tiny(5), *ids).mean(count_up, memory=old, draw=DRAW)
    assert look(old) == ([0.0] * 5, [0] * 5)


def test_a_rejected_client_keeps_what_it_had(tiny):
    gathered, memory = tiny(3).gather(forget_unless_fine, memory=Memory.start(torch.zeros(1), 3), draw=DRAW)
    assert gathered.ids.tolist() == [0, 2]
    assert memory.payload.flatten().tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "read",
    [
        lambda m: m[0],
        list,
        len,
        float,
        bool,
        np.asarray,
        np.array,
        lambda m: np.asarray(m, dtype=np.float64),
        torch.as_tensor,
        lambda m: 0.0 in m,
    ],
)
def test_server_code_cannot_read_it(read):
    with pytest.raises(PlacementError, match=r"ask for it with fed\.gather or fed\.mean"):
        read(Memory.start(torch.zeros(2), 3))


def test_server_code_cannot_compute_with_it():
    for compute in (lambda m: m + 1.0, lambda m: torch.ones(2) * m, lambda m: m @ torch.ones(2), int):
        with pytest.raises(TypeError):
            compute(Memory.start(torch.zeros(2), 3))


def test_no_method_reaches_for_what_is_held():
    for path in Path(coterie.methods.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {
                *([node.id] if isinstance(node, ast.Name) else []),
                *([node.attr] if isinstance(node, ast.Attribute) else []),
                *([node.name] if isinstance(node, ast.alias) else []),
            }
            assert not names & {"held", "_held"}, f"{path.name} looks into client memory"
