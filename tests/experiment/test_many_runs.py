"""Commands of many runs: stopped anywhere they are resumed to the same bits, and nobody disturbs them at work."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folders import assert_same_results

from coterie import storage
from coterie.errors import RunError, UsageError
from coterie.experiment import processes, worker
from coterie.experiment import run as experiment
from coterie.experiment.config import load
from coterie.experiment.records import rounds_done
from coterie.reproduce import running
from coterie.reproduce.leaderboard import contests, leaderboard
from coterie.storage import sole_user

Command = Callable[..., Any]
Contents = Callable[[Path], dict[str, str]]

SMALL = [
    "--problem",
    "quadratic",
    "--set",
    "run.checkpoint=1",
    "--set",
    "run.threads=1",
    "--rounds",
    "3",
    "--jobs",
    "1",
]
COMMANDS: dict[str, list[str]] = {
    "tune": ["tune", *SMALL, "--method", "fedavg", "--grid", "method.step=0.1,0.2,0.05"],
    "compare": ["compare", *SMALL, "--methods", "meritfed,fedavg", "--seeds", "0,1", "--set", "fedavg.step=0.05"],
}
RUNS = {"tune": "trials", "compare": "runs"}


def when_one_is_over(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do something after the first run; if that raises, no other run is made."""
    make, began = processes._Workers.run, []

    def acting(self: Any, job: processes.Job) -> dict[str, Any]:
        began.append(job)
        if len(began) > 1 and act is interrupt:
            raise RunError("stopped before it began.")
        summary = make(self, job)
        if len(began) == 1:
            act()
        return summary

    monkeypatch.setattr(processes._Workers, "run", acting)


def interrupt() -> None:
    raise KeyboardInterrupt


def assert_same(name: str, one: Path, two: Path) -> None:
    """The choice or the table, and every run."""
    plans = [json.loads((folder / f"{name}.json").read_text()) for folder in (one, two)]
    for plan in plans:
        for listed in (*plan.get("runs", ()), *plan.get("rows", ())):
            listed["seconds"] = 0
    assert plans[0] == plans[1]
    assert plans[0]["outcome"] == "finished"
    runs = [sorted(p.parent.name for p in folder.glob("*/*/summary.json")) for folder in (one, two)]
    assert runs[0] == runs[1] != []
    for run in runs[0]:
        assert_same_results(one / RUNS[name] / run, two / RUNS[name] / run)
    if name == "tune":
        assert (one / "best.toml").read_bytes() == (two / "best.toml").read_bytes()


@pytest.mark.usefixtures("workers_here", "no_waiting_for_disks")
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("by", ["the same command", "coterie resume"])
def test_what_was_stopped_is_continued_run_by_run(coterie: Command, tmp_path: Path, name: str, by: str) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert coterie(*COMMANDS[name], "--out", whole).code == 0

    with pytest.MonkeyPatch.context() as patch:
        when_one_is_over(patch, interrupt)
        stopped = coterie(*COMMANDS[name], "--out", broken)
    assert stopped.code == 1
    assert f"Resume it with: coterie resume {broken}" in stopped.err
    assert json.loads((broken / f"{name}.json").read_text())["outcome"] == "not finished"
    done = {path: path.stat().st_mtime_ns for path in broken.glob("*/*/summary.json")}
    assert len(done) == 1
    again = coterie("resume", broken) if by == "coterie resume" else coterie(*COMMANDS[name], "--out", broken)
    assert again.code == 0, again.err
    assert_same(name, whole, broken)
    assert {path: path.stat().st_mtime_ns for path in done} == done


@pytest.mark.usefixtures("workers_here")
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_killed_tune_is_continued_to_the_same_bits(coterie: Command, tmp_path: Path, number: signal.Signals) -> None:
    """Whenever the signal comes: wherever it was, the second command goes on from there."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    arguments = [*COMMANDS["tune"], "--rounds", "40", "--grid", "method.step=0.1,0.2", "--out"]
    assert coterie(*arguments, whole).code == 0
    command = [sys.executable, "-m", "coterie", *arguments, str(broken)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while rounds_done(broken / "trials" / "000") < 10 and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(number)
        _, complaint = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    if number != signal.SIGKILL and process.returncode != 0:
        assert process.returncode == 1
        assert f"Resume it with: coterie resume {broken}" in complaint
    # at once: the worker of the killed command may still be saving its run
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert_same("tune", whole, broken)


@pytest.mark.usefixtures("workers_here", "no_waiting_for_disks")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_at_work_is_locked_as_a_whole(
    coterie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: Contents, name: str
) -> None:
    folder, refused = tmp_path / "many", []

    def intrude() -> None:
        with pytest.raises(UsageError) as error, sole_user(folder):
            pass
        refused.append(str(error.value))

    when_one_is_over(monkeypatch, intrude)
    assert coterie(*COMMANDS[name], "--out", folder).code == 0
    assert len(refused) == 1
    before = contents(folder)
    again = [*COMMANDS[name], "--out", folder]
    run = ["run", "--problem", "quadratic", "--rounds", 1, "--out", folder, "--force"]
    with sole_user(folder):
        for words in (again, [*again, "--force"], ["resume", folder], run):
            done = coterie(*words)
            assert done.code == 2
            assert f"another coterie is at work in {folder} (process {os.getpid()})" in done.err
    assert contents(folder) == before


def test_a_leaderboard_at_work_is_locked(tmp_path: Path) -> None:
    chosen, _ = contests("small", ["friends"])
    with sole_user(tmp_path), pytest.raises(UsageError, match=f"at work in {tmp_path}"):
        leaderboard("small", chosen, tmp_path, methods=["fedavg"])
    with sole_user(tmp_path):  # to read what is there disturbs nobody
        leaderboard("small", chosen, tmp_path, methods=["fedavg"], dry=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_leaderboard_that_is_stopped_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """With the folder of the whole, not with that of one of its problems."""

    def signalled(*args: Any, **more: Any) -> None:
        assert signal.getsignal(number) is not signal.SIG_DFL, "it would kill this process"
        os.kill(os.getpid(), number)

    monkeypatch.setattr(running, "run_all", signalled)
    chosen, _ = contests("small", ["friends"])
    with pytest.raises(RunError, match=rf"stopped; .* Resume it with: the same command with --out {tmp_path}$"):
        leaderboard("small", chosen, tmp_path, methods=["fedavg"])


def test_sigterm_ends_a_command_that_has_no_folder_yet(coterie: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def signalled(*args: Any, **more: Any) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "it would kill this process"
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(experiment, "assemble", signalled)
    done = coterie("run", "--problem", "quadratic", "--out", "nowhere")
    assert (done.code, done.err) == (1, "error: stopped by the user.\n")


def test_a_lock_names_its_process_and_goes_with_it(tmp_path: Path) -> None:
    code = f"from coterie.storage import sole_user\nfrom pathlib import Path\nwith sole_user(Path({str(tmp_path)!r})):"
    other = subprocess.Popen(
        [sys.executable, "-c", f"{code}\n    print(flush=True)\n    input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdout is not None
    try:
        other.stdout.readline()
        with pytest.raises(UsageError, match=f"at work in {tmp_path} .process {other.pid}."), sole_user(tmp_path):
            pytest.fail("two at work")
    finally:
        other.kill()
        other.communicate()
    with sole_user(tmp_path):
        pass


def test_a_worker_waits_for_another_that_still_saves_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose parent was killed, while the same command is already at work again."""
    config, folder, waited = tmp_path / "config.toml", tmp_path / "run", []
    config.write_text('[run]\nproblem = "quadratic"\nmethod = "fedavg"\nrounds = 1\nbaselines = []\n')
    folder.mkdir()
    before = sole_user(folder)
    before.__enter__()

    def look(seconds: float) -> None:
        waited.append(seconds)
        before.__exit__(None, None, None)

    monkeypatch.setattr(storage.time, "sleep", look)
    assert worker.made(config, folder)["outcome"] == "finished"
    assert waited == [storage.LOOK]


@pytest.mark.usefixtures("no_waiting_for_disks")
@pytest.mark.parametrize("made", [12, False])
def test_a_round_that_was_chosen_to_compile_from_is_no_other_setting(tmp_path: Path, made: Any) -> None:
    """Else a grid whose runs had begun to use programs could not be resumed."""
    config = load(sets={"run.problem": "quadratic", "run.method": "fedavg", "run.rounds": 1, "run.baselines": []})
    folder = tmp_path / "run"
    experiment.run(config.with_run(compile=made), folder, lambda name, is_baseline: None)
    processes.check_unchanged([processes.Job(config, folder)])
    with pytest.raises(UsageError, match=rf"made with run.compile = {made}, not 3"):
        processes.check_unchanged([processes.Job(config.with_run(compile=3), folder)])


@pytest.mark.usefixtures("workers_here", "no_waiting_for_disks")
def test_a_run_that_somebody_else_made_meanwhile_is_not_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = {"run.problem": "quadratic", "run.method": "fedavg", "run.rounds": 1, "run.baselines": []}
    jobs = [processes.Job(load(sets={**sets, "method.step": step}), tmp_path / str(step)) for step in (0.1, 0.2)]
    other = load(sets={**sets, "method.step": 0.3})

    def intrude() -> None:
        experiment.run(other, jobs[1].folder, lambda name, is_baseline: None)

    when_one_is_over(monkeypatch, intrude)
    with pytest.raises(UsageError, match=r"made with method.step = 0.3, not 0.2"):
        processes.run_all(jobs, at_once=1)


def test_a_run_whose_process_was_stopped_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "run", lambda *args, **more: {"outcome": "stopped"})
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(RunError, match="its process was stopped; the same command resumes it"):
        worker.made(tmp_path / "config.toml", tmp_path / "run")


def test_a_folder_of_runs_names_the_commands_that_resume_it(coterie: Command, tmp_path: Path) -> None:
    (tmp_path / "friends" / "fedavg").mkdir(parents=True)
    (tmp_path / "friends" / "fedavg" / "config.toml").write_text("")
    done = coterie("resume", tmp_path)
    assert done.code == 2
    assert f"`coterie reproduce` or `coterie leaderboard`, with --out {tmp_path}" in done.err


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_a_damaged_plan_is_explained(coterie: Command, tmp_path: Path, text: str) -> None:
    (tmp_path / "tune.json").write_text(text)
    done = coterie("resume", tmp_path)
    assert done.code == 2
    assert "tune.json does not say what to resume" in done.err
    assert f"the same command with --out {tmp_path}" in done.err
