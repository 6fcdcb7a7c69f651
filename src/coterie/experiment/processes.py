"""Many runs, some at a time, by worker processes: grids, comparisons, reproductions.

Each has a result folder of its own, so it can be resumed and looked at; one that is finished is read, not run again.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from pathlib import Path
from threading import Lock, local
from typing import Any, NamedTuple

from coterie import machine
from coterie.consent import search_path
from coterie.errors import RunError, UsageError
from coterie.experiment.config import Config, load
from coterie.experiment.records import rounds_done as rounds_done
from coterie.experiment.run import finished
from coterie.storage import make_folder, write_atomically

TICK = 0.5
NOT_COMPARED = {  # how often and on what a run is made, not what it computes
    *("run.threads", "run.checkpoint", "run.record", "run.evaluate"),
    *("federation.mode", "federation.chunk", "federation.memory"),
}


class Job(NamedTuple):
    """A run to be made, and where."""

    config: Config
    folder: Path

    @property
    def source(self) -> Path:
        """The configuration that a worker reads, beside the folder."""
        return self.folder.with_name(f"{self.folder.name}.toml")

    def write(self) -> None:
        """Leave the configuration for a worker, or for whoever resumes."""
        make_folder(self.folder.parent)
        write_atomically(self.source, self.config.with_run(baselines=[]).as_toml().encode())


def check_unchanged(jobs: Sequence[Job]) -> None:
    """Refuse jobs whose folders have runs with other settings: their results would be taken for those of the jobs.

    Args:
        jobs: the runs to be made or resumed.
    """
    for job in jobs:
        if not (job.folder / "config.toml").is_file():
            continue
        made = load(job.folder / "config.toml").settings()
        if job.config.run.compile == "auto":  # a round that was chosen by measurement, as it has been written down
            made["run.compile"] = "auto"
        for key, value in job.config.with_run(baselines=[]).settings().items():
            if key not in NOT_COMPARED and made.get(key) != value:
                raise UsageError(
                    f"{job.folder} was made with {key} = {made.get(key)}, not {value}; choose another --out, "
                    "or delete that folder to run it again."
                )


class Watch:
    """Hears how a batch of runs comes along. This one says nothing."""

    def begin(self, jobs: Sequence[Job]) -> None:
        """What will be run."""

    def over(self, job: Job, summary: dict[str, Any]) -> None:
        """One of them has ended."""

    def tick(self) -> None:
        """Some time has passed."""


class _Worker:
    """A process that makes one run after the other."""

    def __init__(self, threads: int, portable: bool) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "coterie.experiment.worker", str(os.getpid())],  # without the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": search_path(),
                "OMP_NUM_THREADS": str(threads),
                **machine.environment(portable),
            },
        )

    def make(self, config: Path, folder: Path) -> dict[str, Any]:
        """One run's summary."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps({"config": str(config), "folder": str(folder)}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._said.seek(0)
            last = self._said.read().decode(errors="replace").strip().splitlines()[-1:]
            raise RunError(f"the run in {folder} failed: {' '.join(last) or 'its process has ended'}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RunError(f"the run in {folder} failed: {answer['error']}")
        return dict(answer["summary"])

    def stop(self) -> None:
        """The run that it makes ends, with its state saved."""
        self._process.terminate()

    def close(self) -> None:
        """No more runs."""
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # it ended with something still to be read
                if pipe is not None:
                    pipe.close()
        self._process.wait()
        self._said.close()

    @property
    def is_there(self) -> bool:
        """Whether it can make another run."""
        return self._process.poll() is None


class _Workers:
    """Workers, one per thread that needs one; one that has died is replaced."""

    def __init__(self, threads: int, portable: bool) -> None:
        self._threads, self._portable, self._lock = threads, portable, Lock()
        self._own, self._all = local(), list[_Worker]()
        self._closed = False

    def run(self, job: Job) -> dict[str, Any]:
        """A finished run is read, and one that diverged, since it would again; an interrupted one is resumed."""
        check_unchanged([job])  # again: somebody may have made another run there meanwhile
        folder, begun = job.folder, job.folder / "config.toml"
        if begun.is_file() and (known := finished(folder, load(begun).run, or_diverged=True)) is not None:
            return known
        job.write()
        return self._worker().make(job.source, folder)

    def _worker(self) -> _Worker:
        worker: _Worker | None = getattr(self._own, "worker", None)
        if worker is None or not worker.is_there:
            with self._lock:
                if self._closed:
                    raise RunError("stopped before it began.")
                worker = self._own.worker = _Worker(self._threads, self._portable)
                self._all.append(worker)
        return worker

    def stop(self) -> None:
        """All runs end, with their states saved."""
        with self._lock:
            self._closed = True
            for worker in self._all:
                worker.stop()

    def close(self) -> None:
        """When all runs are over."""
        for worker in self._all:
            worker.close()


def run_all(jobs: Sequence[Job], *, at_once: int | None = None, watch: Watch | None = None) -> list[dict[str, Any]]:
    """Run all, in the order given, and return their summaries.

    at_once is by default one per core; the cores are shared out among them. Folders are taken as they are: call
    `check_unchanged` first where their settings may be others.
    """
    watch = watch or Watch()
    cores = machine.cores()
    workers = max(1, min(at_once or cores, len(jobs)))
    threads = max(1, cores // workers)
    portable = machine.wanted() or any(job.config.run.portable for job in jobs)
    summaries: dict[int, dict[str, Any]] = {}
    watch.begin(jobs)
    with closing(_Workers(threads, portable)) as helpers, ThreadPoolExecutor(workers) as pool:
        waiting: dict[Future[dict[str, Any]], int] = {}
        try:
            waiting = {pool.submit(helpers.run, job): i for i, job in enumerate(jobs)}
            while waiting:
                done, _ = wait(waiting, timeout=TICK, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda future: waiting[future]):
                    i = waiting.pop(future)
                    summaries[i] = future.result()
                    watch.over(jobs[i], summaries[i])
                watch.tick()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            helpers.stop()
            raise
    return [summaries[i] for i in range(len(jobs))]
