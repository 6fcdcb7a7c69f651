"""Functions of tensors as native programs: recorded once, compiled by a process of their own, kept on disk.

A function is recorded on tensors without numbers (`record`), which gives a graph of torch's own operations whose inputs
are all tensors that it uses. The text of the graph, with shapes and types, names the program. `Builder` compiles it
ahead of time with TorchInductor in another process, so that the caller goes on meanwhile, and puts one shared library
into the cache folder, where later processes find it. Loading one needs no compiler and no import of it.

What lies in the cache folder is run. So only the user may write to it or rename a folder above it, and a library bears
its SHA-256 in its name: one that was cut or changed would end the process that loads it without a word.
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from platformdirs import user_cache_path
from torch import Tensor
from torch.func import functionalize

from coterie import __version__
from coterie.machine import keep_memory
from coterie.numerics.rewriting import in_one_product, looked_up, once
from coterie.numerics.tracing import Unbuildable, Untraceable, recorded

FOLDER = "COTERIE_COMPILED"  # environment variable: another folder for compiled programs
NODES = 6000  # operations of a graph; more take the compiler many minutes
SHARED = 1 << 24  # bytes of values that share one allocation; hundreds of small ones cost a tenth of a short round
FEW = 1024  # numbers of a constant that are compared
KNOWN = {"torch", "device", "inf", "nan"}  # what the text of a graph may refer to
Form = tuple[str, list[int]]


class Graph(NamedTuple):
    """A recorded function: its text, the forms of its inputs, and the constants, which are its last inputs."""

    text: str
    forms: tuple[Form, ...]
    constants: tuple[Tensor, ...]
    nodes: int
    bytes: int  # of all values that are computed

    @property
    def options(self) -> dict[str, Any]:
        """How it is compiled. A few small values share one allocation; large ones are freed as soon as possible."""
        return {**OPTIONS, "memory_planning": self.bytes <= SHARED}

    def key(self, threads: int) -> str:
        """The name of the program, the same wherever it would be the same."""
        about = [
            self.text,
            self.forms,
            torch.__version__,
            torch.backends.cpu.get_cpu_capability(),
            threads,
            self.options,
        ]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


OPTIONS: dict[str, Any] = {
    "pattern_matcher": False,  # of torch 2.13: it turned a Hessian-vector product into another number
    # generated products (max_autotune) were tried: slower than the library's where they are large, a tie where small
}


def record(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Graph:
    """The operations of a function of tensors, for inputs of this form; `Untraceable` where that is impossible.

    Args:
        function: takes the inputs and returns tensors. Other tensors that it uses become constants.
        inputs: tensors; their numbers do not matter.

    Example:
        >>> record(lambda x: [x * 2], [torch.ones(3)]).forms
        (('float32', [3]),)
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.graph import CodeGen

    try:
        with torch.no_grad(), recorded(), _unlogged():
            first = make_fx(_limited(function), tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
            constants = _lifted(first)
            second = make_fx(functionalize(first), tracing_mode="fake")(*inputs, *constants)
    except Untraceable:
        raise
    except Exception as error:  # whatever a function does that cannot be recorded
        raise Untraceable(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    shapes = (getattr(node.meta.get("val"), "shape", ()) for node in second.graph.nodes)
    if not all(type(length) is int for shape in shapes for length in shape):
        raise Untraceable("how long its tensors are depends on their numbers")
    graph = second.graph
    once(graph)
    looked_up(graph)
    in_one_product(graph)
    nodes = len(graph.nodes)
    if nodes > NODES:
        raise Untraceable(f"it has more than {NODES} operations")
    graph.set_codegen(CodeGen())
    code = graph.python_code("self")
    names = {name for name in code.globals if re.search(rf"\b{name}\b", code.src)}
    if not names <= KNOWN or "self." in code.src:
        raise Untraceable(f"its graph refers to {', '.join(sorted(names - KNOWN)) or 'attributes'}")
    made = (node for node in graph.nodes if node.op == "call_function" and not _is_view(node.target))
    values = (node.meta.get("val") for node in made)
    size = sum(value.nbytes for value in values if isinstance(value, Tensor))
    return Graph(code.src, tuple(map(form, (*inputs, *constants))), constants, nodes, size)


def _is_view(target: Any) -> bool:
    """Whether an operation computes nothing."""
    return getattr(target, "is_view", False)


def _limited(function: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
    """The function, which gives up after twice as many operations as a graph may have: half of them may be repetitions.

    Recording an operation takes a millisecond or more, and the caller waits for it.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Limit(TorchDispatchMode):  # type: ignore[no-untyped-call]
        count = 0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            if self.count > 2 * NODES:
                raise Untraceable(f"it has more than {NODES} operations")
            return op(*args, **(kwargs or {}))

    def limited(*inputs: Tensor) -> Sequence[Tensor]:
        with Limit():  # type: ignore[no-untyped-call]
            return function(*inputs)

    return limited


@contextmanager
def _unlogged() -> Iterator[None]:
    """Without torch's log of what cannot be recorded: here that is an answer."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def form(tensor: Tensor) -> Form:
    """Type and shape."""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _lifted(module: Any) -> tuple[Tensor, ...]:
    """The tensors that a graph holds, each once, made its last inputs."""
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    constants: list[Tensor] = []
    places: list[Any] = []
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        held = getattr(module, node.target).detach().contiguous()
        known = [i for i, other in enumerate(constants) if _same(held, other)]
        if not known:
            known = [len(constants)]
            constants.append(held)
            with graph.inserting_after(last):
                last = graph.placeholder(f"constant_{len(constants)}")
            places.append(last)
        node.replace_all_uses_with(places[known[0]])
        graph.erase_node(node)
    module.recompile()
    return tuple(constants)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two constants are one: the same memory, or a few equal numbers."""
    if form(a) != form(b):
        return False
    return a.data_ptr() == b.data_ptr() or (a.numel() <= FEW and torch.equal(a, b))


class Program:
    """A compiled function. Inputs must have the forms that it was compiled for; what is not contiguous is copied."""

    def __init__(self, file: Path, graph: Graph) -> None:
        keep_memory()
        self._runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(file), 1)
        self._constants = list(graph.constants)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The function's values."""
        given = [t if t.is_contiguous() else t.contiguous() for t in inputs]
        return self._runner.run(given + self._constants)


def folder() -> Path:
    """Where compiled programs of these versions of coterie and torch are kept, for this user alone.

    The environment variable COTERIE_COMPILED names another folder for all versions.
    """
    given = os.environ.get(FOLDER)
    root = Path(given).expanduser() if given else user_cache_path("coterie") / "compiled"
    place = root.resolve() / f"coterie-{__version__}-torch-{torch.__version__}"
    for path in (*reversed(place.parents), place):
        path.mkdir(mode=0o700, exist_ok=True)
        if fault := _insecure(path.stat(), above=path != place):
            raise Unbuildable(
                f"{path} {fault}, and programs in {place} would be run; chmod go-w {path}, or set {FOLDER}"
            )
    return place


def _insecure(about: os.stat_result, *, above: bool = False) -> str:
    """Who else could change a file or folder, by the rules of ssh; nothing where nobody could.

    Above it, a sticky folder such as /tmp will do, where nobody renames what others have.
    """
    if not hasattr(os, "getuid"):
        return ""
    if about.st_uid not in (0, os.getuid()):
        return "belongs to another user"
    sticky = above and about.st_mode & stat.S_ISVTX
    return "may be changed by others" if about.st_mode & 0o022 and not sticky else ""


def program_name(key: str, library: bytes) -> str:
    """The name of a program's file: its graph's key, and the SHA-256 of its content.

    Args:
        key: of the graph.
        library: the content.

    Example:
        >>> program_name("key", b"")
        'key-e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855.so'
    """
    return f"{key}-{hashlib.sha256(library).hexdigest()}.so"


def _fault(file: Path, key: str) -> str:
    """Why a stored program must not be loaded; nothing where it is sound."""
    about = file.lstat()
    if not stat.S_ISREG(about.st_mode):
        return "is no ordinary file"
    if about.st_nlink != 1:
        return "has a second name (a hard link)"
    if fault := _insecure(about):
        return fault
    return (
        "" if program_name(key, file.read_bytes()) == file.name else "is damaged: its SHA-256 is not that of its name"
    )


class Builder:
    """The compilation of one graph, in a process of its own; nothing where the program is there already.

    Args:
        graph: what to compile.
        threads: how many threads the program may use.
        note: receives what the user should know, such as the name of a damaged program.
    """

    def __init__(self, graph: Graph, threads: int, note: Callable[[str], None] = lambda text: None) -> None:
        self.graph, self._process, self._place = graph, None, ""
        self._folder, self._key = folder(), graph.key(threads)
        if self._stored(note) is not None:
            return
        if shutil.which("g++") is None and shutil.which("clang++") is None and "CXX" not in os.environ:
            raise Unbuildable("there is no C++ compiler (g++ or clang++)")
        self._place = tempfile.mkdtemp(prefix="coterie-compile-")
        order = {"text": graph.text, "forms": graph.forms, "threads": threads, "options": graph.options}
        order |= {"folder": str(self._folder), "key": self._key}
        Path(self._place, "graph.json").write_text(json.dumps(order), encoding="utf-8")
        with Path(self._place, "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "coterie.numerics.compile_graph", self._place],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": self._place, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C ends the run first, and that ends this
            )

    def _stored(self, note: Callable[[str], None]) -> Path | None:
        """The file of the program, checked; what must not be loaded is removed, and noted."""
        for file in sorted(self._folder.glob(f"{self._key}-*.so")):
            fault = _fault(file, self._key)
            if not fault:
                return file
            file.unlink()
            note(f"the compiled program {file} {fault}; it was removed and is built anew")
        return None

    @property
    def busy(self) -> bool:
        """Whether it is still compiling."""
        return self._process is not None and self._process.poll() is None

    def program(self) -> Program:
        """The program, waited for; `Unbuildable` where compiling failed."""
        if self._process is not None:
            self._process.wait()
        faults: list[str] = []
        file = self._stored(faults.append)
        if file is None and self._place:
            lines = Path(self._place, "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            faults.append(f"the compiler failed: {_gist(lines) if lines else 'without a word'}")
        self.close()
        if file is None:
            raise Unbuildable("; ".join(faults) or f"the compiled program was removed from {self._folder}")
        try:
            return Program(file, self.graph)
        except RuntimeError as error:  # of another machine
            file.unlink(missing_ok=True)
            raise Unbuildable(f"the compiled program cannot be loaded: {str(error).splitlines()[0][:200]}") from error

    def close(self) -> None:
        """End the compilation, and leave nothing behind but the program."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, 15)
            self._process.wait()
        if self._place:
            shutil.rmtree(self._place, ignore_errors=True)
            self._place = ""


def _gist(lines: list[str]) -> str:
    """The line of a log that names the error, or the last one."""
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or lines)[-1][:200]


def namespace() -> dict[str, Any]:
    """What the text of a graph may refer to."""
    return {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}


__all__ = ["Builder", "Graph", "Program", "folder", "program_name", "record"]
