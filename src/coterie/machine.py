"""The machine under a run: which kernels compute it, held so that bits do not change unnoticed, and their names.

MKL chooses kernels by processor and problem size, unless a branch is fixed before its first use. `prepare` fixes one
when coterie is imported. It runs before torch is used, so this module imports the standard library only; functions
that need torch import it when they are called.

A portable process computes with kernels that Intel and AMD share: MKL's COMPATIBLE branch (the only one that MKL gives
both vendors: on AMD it takes every other name for AUTO), ATen's AVX2 kernels, no oneDNN (it blocks by cache sizes) and
one thread.
"""

import os
import platform as system
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from coterie.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, device, dtype

DtypeLike: TypeAlias = "str | dtype"
DeviceLike: TypeAlias = "str | device"
HALF = (
    "Updates of many clients are summed up and differentiated twice, for which the 8 bits of bfloat16 are too few; "
    "leave dtype at float32, to which a model's shorter numbers are converted."
)

VARIABLE = "COTERIE_PORTABLE"
BRANCH = "AUTO,STRICT"
PORTABLE = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # it is switched off; should a library switch it on again, then to this
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
BRANCHES = ("off", "AUTO", "COMPATIBLE", "SSE2", "SSE3", "SSSE3", "SSE4_1", "SSE4_2", "AVX", "AVX2", "AVX512_MIC")
CNR = dict(enumerate((*BRANCHES, "AVX512", "AVX512_MIC_E1", "AVX512_E1"), 1))
"""MKL's branches of conditional numerical reproducibility, by its numbers for them."""
STRICT = 0x10000
DEPENDS = "bits depend on the chunk here"
LATE = (
    "MKL was used before coterie was imported, so that its branch could not be fixed; import coterie first, or set "
    f"MKL_CBWR={BRANCH} in the environment"
)


MALLOC = {-3: 32 << 20, -1: 256 << 20}
"""What glibc's mallopt is told: M_MMAP_THRESHOLD, its largest value, and M_TRIM_THRESHOLD, both in bytes."""


class NotPortable(UsageError):
    """A portable run in a process whose kernels are not held; the command line starts itself again."""


def cores() -> int:
    """The processors that this process may use; `taskset` or a container may leave it fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(portable: bool = False) -> None:
    """Fix the kernels of this process and its children; call it before torch is used. Importing coterie calls it.

    Args:
        portable: whether to hold kernels that Intel and AMD share; COTERIE_PORTABLE=1 in the environment does the same.
    """
    os.environ.update(environment(portable or wanted()))


def wanted() -> bool:
    """Whether the environment asks for a portable process."""
    return os.environ.get(VARIABLE) == "1"


def environment(portable: bool) -> dict[str, str]:
    """The variables that fix the kernels of a process, for one that is to be started.

    Args:
        portable: whether to hold kernels that Intel and AMD share; else a branch that the caller has set is kept.
    """
    return {VARIABLE: "1", **PORTABLE} if portable else {"MKL_CBWR": os.environ.get("MKL_CBWR", BRANCH)}


@cache
def keep_memory() -> None:
    """Let the C library keep memory that is freed, up to 256 MiB, instead of returning it to the system.

    Each round allocates what the one before it freed. Where that went back to the system, every page is zeroed and
    mapped again: 9,000 pages per epoch of FedNest, which took a fifth of its time. Only glibc is told, and not where
    the environment has settings of its own for it.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    if system.libc_ver()[0] == "glibc":
        import ctypes

        for parameter, value in MALLOC.items():
            ctypes.CDLL(None).mallopt(parameter, value)


def hold() -> None:
    """What a portable process holds by torch's own switches; called where coterie first imports torch."""
    if wanted():
        import torch

        torch.set_num_threads(1)
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
        torch.backends.nnpack.set_flags(False)  # type: ignore[no-untyped-call]


def require(portable: bool) -> None:
    """Refuse a portable run where kernels are not held.

    Args:
        portable: whether the run is a portable one; others run anywhere.
    """
    if portable and (trouble := not_held()):
        raise NotPortable(
            f"run.portable = true, but {trouble}. Set {VARIABLE}=1 in the environment, or call "
            "coterie.machine.prepare(portable=True) before torch is first used."
        )


def checked_dtype(dtype: DtypeLike) -> Literal["float32", "float64"]:
    """The type of a run's numbers by its name; another one is refused.

    Args:
        dtype: "float32" or "float64", or torch's types of these names.

    Example:
        >>> import torch
        >>> checked_dtype("float32"), checked_dtype(torch.float64)
        ('float32', 'float64')
    """
    match str(dtype).removeprefix("torch."):
        case "float32":
            return "float32"
        case "float64":
            return "float64"
    raise UsageError(f"dtype is {dtype!r}; it must be 'float32' or 'float64'. {HALF}")


def checked_device(device: DeviceLike, dtype: DtypeLike) -> str:
    """The device by its name; one that does not exist here is refused with the remedy.

    Args:
        device: cpu, cuda, cuda:N or mps.
        dtype: float32 or float64; mps has no float64.

    Example:
        >>> checked_device("cpu", "float64")
        'cpu'
    """
    import torch

    name = str(device)
    kind, _, index = name.partition(":")
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if kind not in count or (index and not index.isdecimal()):
        raise UsageError(f"run.device {name!r} is none of cpu, cuda, cuda:N, mps.")
    if int(index or 0) >= count[kind]:
        raise UsageError(f"run.device {name} is not available here; set run.device=cpu.")
    if kind == "mps" and checked_dtype(dtype) == "float64":
        raise UsageError("run.device mps has no float64; set run.dtype=float32 or run.device=cpu.")
    return name


def not_held() -> str:
    """Why this process is not a portable one; empty if it is."""
    import torch

    if not _has_mkl():
        return f"torch computes with {blas()[0]} here, not with MKL, whose branches can be held"
    if branch() not in ("COMPATIBLE", "unknown") or not wanted():
        return f"MKL's branch is {branch()}, not COMPATIBLE"
    if (kernels := torch.backends.cpu.get_cpu_capability()) != "AVX2":
        return f"ATen's kernels are {kernels}, not AVX2"
    return ""


def restart() -> None:
    """Start this command again as a portable process; it returns only where that is not possible."""
    arguments = sys.argv[1:]
    same = sys.orig_argv[len(sys.orig_argv) - len(arguments) :] == arguments  # else this is no process of its own
    if same and not wanted() and os.name == "posix":
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **environment(True)})


def branch() -> str:
    """MKL's branch as MKL itself reports it; none without MKL, unknown where torch does not show MKL's functions."""
    if not _has_mkl():
        return "none"
    code = _mkl("mkl_serv_cbwr_get", "MKL_CBWR_Get", -1)
    if code is None:
        return "unknown"
    name = CNR.get(code & ~STRICT, str(code))
    return f"{name},STRICT" if code & STRICT else name


def _has_mkl() -> bool:
    import torch

    return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]


def _mkl(own: str, public: str, argument: int) -> int | None:
    """The answer of a function of MKL, wherever it is linked into torch."""
    import ctypes

    import torch

    inside = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for library in (str(inside) if inside.is_file() else None, None):
        try:
            shown = ctypes.CDLL(library)
        except (OSError, TypeError):  # Windows has no library without a name
            continue
        for name in (own, public):
            if hasattr(shown, name):
                return int(getattr(shown, name)(argument))
    return None


def blas() -> tuple[str, str]:
    """The name and version of the library that multiplies matrices in torch."""
    import torch

    built = torch.__config__.show()
    if _has_mkl():
        _, found, rest = built.partition("Math Kernel Library Version ")
        return "MKL", rest.split(" ")[0] if found else ""
    _, found, rest = built.partition("BLAS_INFO=")
    return rest.split(",")[0] if found else "unknown", ""


@cache
def platform() -> dict[str, str]:
    """Versions, kernels and processor: what the last bit of a result may depend on, apart from its settings."""
    from importlib.metadata import version

    import numpy
    import torch

    name, number = blas()
    return {
        "coterie": version("coterie"),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": system.python_version(),
        "blas": f"{name} {number}".strip(),
        "branch": branch(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(),
        "platform": f"{system.system()} {system.machine()}",
        "libc": " ".join(system.libc_ver()).strip(),
    }


def processor() -> str:
    """The processor's model by its maker's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return system.processor() or system.machine()
    facts = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
    parts = [facts.get("model name", system.machine())]
    parts += [f"{key} {facts[key]}" for key in ("cpu family", "model") if key in facts]
    return ", ".join(parts)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """By what two platforms differ, in words; what only one of them names is left out.

    Args:
        before: the platform that a result was begun on.
        now: the platform that it is resumed on.
    """
    return [f"{key} was {before[key]}, is {now[key]}" for key in now if key in before and before[key] != now[key]]


def concerns(before: Mapping[str, Any]) -> list[str]:
    """What the user should know about the bits of a run in this process, one sentence each; mostly nothing.

    Args:
        before: the platform that the run was begun on; empty for a new run.
    """
    other = changes(before, platform())
    said = [f"resumed on another platform, so that bits may differ: {'; '.join(other)}"] if other else []
    if depends_on_chunk():
        kernels = f"by the kernels of {' '.join(blas())} on {processor()}"
        said.append(f"{DEPENDS}: {LATE if branch() == 'off' else kernels}")
    return said


@cache
def depends_on_chunk() -> bool:
    """Whether products or convolutions of several clients at once give other bits than those of fewer clients.

    The self-check, once per process, on one thread: some 20 ms, most of it the first use of the kernels. (On several
    threads oneDNN's grouped float32 convolutions depend on the chunk everywhere.)
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return not all(map(_same_in_chunks, _works()))
    finally:
        torch.set_num_threads(threads)


CLIENTS = 7
CHUNKS = (2, 3)  # each leaves a lone client
SHAPES = ((1, 64, 10), (5, 784, 10), (6, 20, 30))  # rows, inputs, outputs

Work = Callable[["Tensor"], "Tensor"]


def _works() -> Iterator[Work]:
    """Works at numbered clients as vmap runs them: a layer, its derivatives, and a convolution."""
    import torch
    from torch import bmm

    stream = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        draw = partial(torch.randn, dtype=dtype, generator=stream)
        for rows, inputs, outputs in SHAPES:
            x, w, y = draw(CLIENTS, rows, inputs), draw(CLIENTS, inputs, outputs), draw(CLIENTS, rows, outputs)
            yield partial(lambda x, w, k: bmm(x[k], w[k]), x, w)
            yield partial(lambda x, y, k: bmm(x[k].transpose(1, 2), y[k]), x, y)
            yield partial(lambda y, w, k: bmm(y[k], w[k].transpose(1, 2)), y, w)
        images, kernels = draw(CLIENTS, 3, 4, 8, 8), draw(CLIENTS, 6, 4, 3, 3)
        yield partial(_convolved, images, kernels)


def _convolved(images: "Tensor", kernels: "Tensor", clients: "Tensor") -> "Tensor":
    """Each client's images with its own kernels: the grouped convolution that vmap makes of it, without vmap."""
    import torch

    n, (rows, channels, *size) = len(clients), images.shape[1:]
    grouped = images[clients].transpose(0, 1).reshape(rows, n * channels, *size)
    convolved = torch.conv2d(grouped, kernels[clients].flatten(0, 1), groups=n)
    return convolved.reshape(rows, n, -1, *convolved.shape[2:]).transpose(0, 1)


def _same_in_chunks(work: Work) -> bool:
    """Whether a work at all clients gives the bits of the same work chunk after chunk; a lone client is doubled."""
    import torch

    clients = torch.arange(CLIENTS)
    whole, chunks = work(clients), [chunk for size in CHUNKS for chunk in torch.split(clients, size)]
    parts = (work(chunk if len(chunk) > 1 else chunk.repeat(2))[: len(chunk)] for chunk in chunks)
    return all(torch.equal(part, whole[chunk]) for part, chunk in zip(parts, chunks, strict=True))
