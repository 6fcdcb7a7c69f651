"""Programs: what names them, where they are kept, and that whatever goes wrong is a reason and no crash."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coterie.numerics import compile_graph, programs
from coterie.numerics.programs import Builder, Graph, program_name, record
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


GRAPH = record(lambda x: [x * 2], [torch.ones(3)])


def stored(content: bytes = b"a library") -> Path:
    """A program of GRAPH as the compiler would leave it."""
    file = programs.folder() / program_name(GRAPH.key(1), content)
    file.write_bytes(content)
    file.chmod(0o600)
    return file


def test_a_folder_per_version_that_others_cannot_enter(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        first = programs.folder()
    finally:
        os.umask(before)
    assert first.parent == kept
    assert [path.stat().st_mode & 0o777 for path in (kept, first)] == [0o700, 0o700]
    monkeypatch.setattr(programs, "__version__", "9.9")
    assert programs.folder().name == f"coterie-9.9-torch-{torch.__version__}"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_folder_or_parent_that_others_may_write_to_is_refused(kept: Path, level: int, mode: int) -> None:
    place = programs.folder()
    path = (place, *place.parents)[level]
    path.chmod(mode)
    try:
        with pytest.raises(Untraceable, match=re.escape(f"{path} may be changed by others")):
            Builder(GRAPH, 1)
        path.chmod(mode | 0o1000)  # as /tmp: nobody can rename what is somebody else's
        with nullcontext() if level else pytest.raises(Untraceable, match="chmod go-w"):
            assert programs.folder() == place
    finally:
        path.chmod(0o700)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners here")
def test_a_folder_of_another_user_is_refused(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, uid = programs.folder(), os.getuid()
    about = os.stat_result((0o40700, 0, 0, 1, uid + 1, 0, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda path, **_: about if path == place else os.stat(path))
    with pytest.raises(Untraceable, match="belongs to another user"):
        Builder(GRAPH, 1)


def test_a_sound_program_is_found_and_nothing_is_compiled(kept: Path) -> None:
    file, notes = stored(), list[str]()
    assert Builder(GRAPH, 1, notes.append)._process is None
    assert file.is_file()
    assert notes == []


def _linked(file: Path) -> None:
    other = file.with_name("other")
    file.rename(other)
    file.symlink_to(other)


CROOKED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "SHA-256"),
    "empty": (lambda file: file.write_bytes(b""), "SHA-256"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"\0"), "SHA-256"),
    "a flipped bit": (lambda file: file.write_bytes(b"b" + file.read_bytes()[1:]), "SHA-256"),
    "a symbolic link": (_linked, "no ordinary file"),
    "a hard link": (lambda file: os.link(file, file.with_name("other")), "hard link"),
    "writable": (lambda file: file.chmod(0o620), "may be changed by others"),
}


@pytest.mark.parametrize("how", CROOKED)
def test_a_crooked_program_is_named_removed_and_built_anew(
    kept: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    change, said = CROOKED[how]
    file, notes = stored(), list[str]()
    change(file)
    code = "import json, pathlib, sys; pathlib.Path({0!r}).write_bytes(b'a library')"
    _broken(monkeypatch, code.format(str(file)))
    loaded: list[Path] = []
    monkeypatch.setattr(programs, "Program", lambda file, graph: loaded.append(file))
    Builder(GRAPH, 1, notes.append).program()
    assert loaded == [file]
    (note,) = notes
    assert str(file) in note
    assert said in note
    assert "built anew" in note


def test_a_program_that_is_damaged_while_the_run_goes_on_is_not_loaded(kept: Path) -> None:
    file = stored()
    builder = Builder(GRAPH, 1)
    file.write_bytes(b"a lib")
    with pytest.raises(Untraceable, match=f"{file.name} is damaged"):
        builder.program()
    assert not file.exists()


def test_a_program_is_flushed_to_disk_under_the_name_of_its_content(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, flushed = tmp_path / "made.so", list[int]()
    made.write_bytes(b"a library")
    order = {"text": GRAPH.text, "forms": GRAPH.forms, "threads": 1, "options": {}}
    order |= {"folder": str(programs.folder()), "key": GRAPH.key(1)}
    (tmp_path / "graph.json").write_text(json.dumps(order))
    monkeypatch.setattr("torch._inductor.aot_compile", lambda *given, **options: made)
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(file) or fsync(file))
    before = os.umask(0)
    try:
        compile_graph.main(tmp_path)
    finally:
        os.umask(before)
    (file,) = programs.folder().iterdir()
    assert (file.name, file.stat().st_mode & 0o777) == (program_name(GRAPH.key(1), b"a library"), 0o600)
    assert len(flushed) == 2  # the file and its folder
    assert Builder(GRAPH, 1)._process is None


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
    assert not list(programs.folder().iterdir())
    assert not Path(builder._place or "/nowhere").exists()


def test_what_is_no_program_of_this_machine_is_removed(kept: Path) -> None:
    file = stored(b"\x7fELF")
    with pytest.raises(Untraceable, match="cannot be loaded"):
        Builder(GRAPH, 1).program()
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
    assert [file.suffix for file in programs.folder().iterdir()] == [".so"]


TWICE = """
import torch
from coterie.numerics.programs import Builder, record
notes = []
program = Builder(record(lambda x: [x * 2], [torch.ones(3)]), 1, notes.append).program()
print(program([torch.ones(3)])[0].tolist(), len(notes))
"""


@compiler
@pytest.mark.slow
def test_a_truncated_program_kills_no_process(kept: Path) -> None:
    """Loading a library whose pages are missing is SIGBUS."""
    for notes in (0, 1, 0):
        done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=600)
        assert (done.returncode, done.stdout.strip()) == (0, f"[2.0, 2.0, 2.0] {notes}"), done.stderr
        (file,) = programs.folder().iterdir()
        if notes == 0:
            os.truncate(file, file.stat().st_size // 2)


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
