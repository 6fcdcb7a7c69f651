"""Which kernels compute a run: a fixed branch, a self-check of chunks, the platform in every result,
and portable runs give the stored digests whatever the environment of the caller says."""

import ctypes
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie import machine
from coterie.errors import UsageError
from coterie.experiment.config import load, platform_of, resolve
from coterie.experiment.run import resume, run
from coterie.methods.registry import METHODS

GOLDEN = Path(__file__).parent / "golden"
STORED = json.loads((GOLDEN / "portable.json").read_text())
SMALL = {
    "run": {"problem": "quadratic", "rounds": 2, "baselines": []},
    "problem": {"clients": 4, "friends": 2, "dimension": 3, "rows": 6},
}
with_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has another BLAS than MKL here")


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, without what this one has set."""
    kept = {k: v for k, v in os.environ.items() if k not in {*machine.PORTABLE, machine.VARIABLE}}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, check=False)


def quiet(name: str, is_baseline: bool) -> None:
    return None


@with_mkl
def test_importing_coterie_fixes_the_branch_and_keeps_one_that_is_set():
    code = "import torch, coterie; torch.ones(9, 9) @ torch.ones(9, 9); print(coterie.machine.branch())"
    assert python(code).stdout.strip() in (machine.BRANCH, "unknown")
    assert python(code, MKL_CBWR="COMPATIBLE").stdout.strip() in ("COMPATIBLE", "unknown")


LATE = """
import torch
torch.set_num_threads(1)
torch.ones(9, 9) @ torch.ones(9, 9)
from coterie import machine
x, w = torch.randn(7, 1, 64), torch.randn(7, 64, 10)
whole = torch.bmm(x, w)
parts = torch.cat([torch.bmm(x[i : i + 2], w[i : i + 2]) for i in (0, 2, 4)])
print(machine.branch(), machine.depends_on_chunk() or torch.equal(parts, whole[:6]), machine.concerns({}))
"""


@with_mkl
def test_a_branch_that_came_too_late_is_reported_truthfully():
    branch, seen, concerns = python(LATE).stdout.strip().split(" ", 2)
    assert branch in ("off", "unknown")
    assert seen == "True"
    assert concerns == "[]" or machine.DEPENDS in concerns


def test_where_bits_depend_on_the_chunk_a_run_says_so_once(tmp_path, monkeypatch):
    heard: list[str] = []

    class Observer:
        def started(self, *_: Any) -> None: ...
        def recorded(self, *_: Any) -> None: ...
        def ended(self, *_: Any) -> None: ...
        def warned(self, concern: str) -> None:
            heard.append(concern)

    monkeypatch.setattr(machine, "depends_on_chunk", lambda: True)
    summary = run(resolve(SMALL), tmp_path / "run", lambda name, is_baseline: Observer())
    assert len(heard) == 1
    assert machine.DEPENDS in heard[0]
    assert summary["notes"] == heard
    assert summary["events"] == {"bits": 1}
    assert summary["platform"]["chunk_free"] is False


def test_the_self_check_is_not_blind(monkeypatch):
    assert machine._same_in_chunks(lambda k: k * 2)
    assert not machine._same_in_chunks(lambda k: k + (len(k) == 3))
    assert not machine._same_in_chunks(lambda k: k + (len(k) == 2))


def test_results_carry_the_platform_and_another_one_is_named_on_resume(tmp_path):
    folder = tmp_path / "run"
    summary = run(resolve(SMALL), folder, quiet)
    named = {"coterie", "torch", "numpy", "python", "blas", "branch", "kernels", "processor", "platform"}
    assert named < summary["platform"].keys()
    assert platform_of(folder / "config.toml") == machine.platform()
    assert load(folder / "config.toml").run == resolve(SMALL).run.model_copy(update={"threads": 1})
    text = (folder / "config.toml").read_text().replace("rounds = 2", "rounds = 3", 1)
    now = machine.platform()["processor"]
    (folder / "config.toml").write_text(text.replace(now, "Another One"))
    again = resume(folder, quiet)
    assert again["rounds"] == 3
    assert again["notes"] == [
        f"resumed on another platform, so that bits may differ: processor was Another One, is {now}"
    ]
    assert again["events"] == {"bits": 1}


def test_a_result_from_before_platforms_still_loads_and_resumes_silently(tmp_path):
    folder = tmp_path / "run"
    run(resolve(SMALL), folder, quiet)
    text = (folder / "config.toml").read_text().replace("rounds = 2", "rounds = 3", 1)
    (folder / "config.toml").write_text(text.split("[platform]")[0].replace("portable = false\n", ""))
    assert "notes" not in resume(folder, quiet)


def test_a_portable_run_is_refused_where_kernels_are_not_held():
    if machine.wanted():
        pytest.skip("this process is a portable one")
    with pytest.raises(UsageError, match="COTERIE_PORTABLE=1"):
        machine.require(True)
    machine.require(False)


@pytest.mark.parametrize("other", [{"threads": 2}, {"compile": True}, {"device": "cuda"}])
def test_what_cannot_be_held_is_refused(other):
    with pytest.raises(UsageError, match="portable = true needs"):
        resolve({"run": {**SMALL["run"], "portable": True, **other}})


def held_here() -> str:
    """Why the stored digests do not apply here; empty where they do."""
    if not torch.backends.mkl.is_available():
        return "torch has another BLAS than MKL here"
    if torch.__version__.partition("+")[0] != STORED["torch"]:
        return f"the digests are of torch {STORED['torch']}, this is {torch.__version__}"
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return "this processor has no AVX2"
    return ""


golden = pytest.mark.skipif(bool(held_here()), reason=held_here() or "held")


def check_digests(**environment: str) -> None:
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = python(code, str(GOLDEN / "portable.py"), **environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == STORED["digests"]


def test_every_method_has_stored_digests():
    assert {name.split()[0] for name in STORED["digests"]} == {entry.name for entry in METHODS}


@golden
def test_portable_runs_give_the_stored_digests():
    check_digests(ATEN_CPU_CAPABILITY="default", MKL_CBWR="AUTO", OMP_NUM_THREADS="2")


@golden
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["avx2", "avx512"])
def test_portable_runs_overrule_the_environment(capability):
    check_digests(ATEN_CPU_CAPABILITY=capability)


@golden
def test_the_command_line_starts_itself_again_for_a_portable_run(tmp_path):
    settings = [f"{table}.{key}={json.dumps(v)}" for table, row in SMALL.items() for key, v in row.items()]
    command = ["run", "--set", "run.portable=true", *(w for s in settings for w in ("--set", s)), "--json"]
    code = "from coterie.cli import main; main()"
    done = python(code, *command, "--out", str(tmp_path / "run"), ATEN_CPU_CAPABILITY="default")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["platform"]["branch"], summary["platform"]["kernels"]) == ("COMPATIBLE", "AVX2")
    table = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert table["run"]["portable"] is True
    assert table["federation"]["mode"] == "vmap"


@pytest.mark.parametrize(("variable", "told"), [(None, dict(machine.MALLOC)), ("MALLOC_ARENA_MAX", {})])
def test_freed_memory_is_kept_unless_the_environment_says_how(monkeypatch, variable, told):
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    heard = {}

    class Library:
        mallopt = staticmethod(heard.__setitem__)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    monkeypatch.setattr(machine.system, "libc_ver", lambda: ("glibc", "2.36"))
    machine.keep_memory.__wrapped__()
    assert heard == told
