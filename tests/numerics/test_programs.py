"""Programs: what names them, where they are kept, and that whatever goes wrong is a reason and no crash."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coterie.numerics import programs
from coterie.numerics.programs import Builder, Graph, record
from coterie.numerics.tracing import Untraceable

compiler = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
A = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def doubled(x: Tensor) -> list[Tensor]:
    return [A @ x * 2.0, (x * 3).sin().sum()]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(programs.FOLDER, str(tmp_path / "compiled"))
    return tmp_path / "compiled"


def test_tensors_that_a_function_uses_become_inputs() -> None:
    graph = record(doubled, [torch.ones(3)])
    assert len(graph.constants) == 1
    assert torch.equal(graph.constants[0], A)
    assert graph.forms == (("float32", [3]), ("float32", [4, 3]))


def test_the_name_depends_on_operations_shapes_and_types_and_on_no_number() -> None:
    def key(x: Tensor, factor: float = 2.0) -> str:
        return record(lambda x: [x * factor], [x]).key(1)

    assert key(torch.ones(3)) == key(torch.zeros(3))
    others = {key(torch.ones(4)), key(torch.ones(3, dtype=torch.float64)), key(torch.ones(3), 3.0)}
    assert len(others) == 3
    assert key(torch.ones(3)) not in others


def test_the_same_work_is_recorded_once() -> None:
    graph = record(lambda x: [x.sin() + x.sin()], [torch.ones(3)])
    assert graph.text.count("sin.default") == 1


@pytest.mark.parametrize("function", [lambda x: [x * float(x.sum())], lambda x: [x[x > 0]], lambda x: [x.nonzero()]])
def test_what_depends_on_numbers_is_not_recorded(function: object) -> None:
    with pytest.raises(Untraceable):
        record(function, [torch.ones(3)])  # type: ignore[arg-type]


def test_a_folder_that_others_may_write_to_is_refused(kept: Path) -> None:
    kept.mkdir()
    kept.chmod(0o777)
    with pytest.raises(Untraceable, match="others may write"):
        Builder(record(doubled, [torch.ones(3)]), 1)


def test_without_a_compiler_nothing_is_begun(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(Untraceable, match=r"no C\+\+ compiler"):
        Builder(record(doubled, [torch.ones(3)]), 1)


def _broken(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    start = subprocess.Popen

    def popen(command: list[str], **more: object) -> object:
        return start([command[0], "-c", code, command[-1]], **more)  # type: ignore[call-overload]

    monkeypatch.setattr(programs.subprocess, "Popen", popen)
    monkeypatch.setenv("CXX", "any")


def test_a_compiler_that_fails_is_a_reason(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _broken(monkeypatch, "raise OSError(28, 'No space left on device')")
    builder = Builder(record(doubled, [torch.ones(3)]), 1)
    with pytest.raises(Untraceable, match="No space left"):
        builder.program()
    assert not list(kept.iterdir())
    assert not Path(builder._place or "/nowhere").exists()


def test_a_program_that_was_cut_short_is_removed(kept: Path) -> None:
    graph = record(doubled, [torch.ones(3)])
    kept.mkdir(mode=0o700)
    file = kept / f"{graph.key(1)}.so"
    file.write_bytes(b"\x7fELF")
    with pytest.raises(Untraceable, match="cannot be loaded"):
        Builder(graph, 1).program()
    assert not file.exists()


def test_a_compilation_ends_with_the_run(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _broken(monkeypatch, "import time; time.sleep(600)")
    builder = Builder(record(doubled, [torch.ones(3)]), 1)
    assert builder.busy
    process, place = builder._process, builder._place
    builder.close()
    assert process is not None
    assert process.poll() is not None
    assert not os.path.exists(place)


@compiler
@pytest.mark.slow
def test_a_program_gives_the_values_and_is_found_again(kept: Path) -> None:
    graph: Graph = record(doubled, [torch.ones(3)])
    x = torch.randn(6, generator=torch.Generator().manual_seed(1))[::2]
    for _ in range(2):
        program = Builder(graph, 1).program()
        for a, b in zip(program([x]), doubled(x), strict=True):
            torch.testing.assert_close(a, b)
    assert [file.suffix for file in kept.iterdir()] == [".so"]


def test_recording_ends_at_twice_as_many_operations_as_a_graph_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "NODES", 10)
    made = []

    def long(x: Tensor) -> list[Tensor]:
        for i in range(1000):
            made.append(i)
            x = x + float(i)
        return [x]

    with pytest.raises(Untraceable, match="more than 10 operations"):
        record(long, [torch.ones(2)])
    assert len(made) <= 21
