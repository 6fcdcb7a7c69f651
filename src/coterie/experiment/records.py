"""The result folder: record files that only grow, and that a resumed run cuts back to its checkpoint."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from coterie.errors import RunError, UsageError, gist
from coterie.experiment.watching import terminable
from coterie.storage import sole_user, tensor_bytes, unfinished, write_atomically

RECORD = "metrics.jsonl"
GROWING = (RECORD, "weights.csv", "events.jsonl")
TAIL = 1 << 16  # bytes


def check(folder: Path, *, force: bool) -> None:
    """Refuse a folder that holds something or, with force, something that is no result."""
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; name a folder with --out.")
        if not folder.is_dir() or all(map(unfinished, folder.iterdir())):
            return
    except OSError as error:
        raise _unwritable(folder, error) from None
    if not force:
        raise UsageError(
            f"{folder} is not empty; choose another --out, continue with `coterie resume {folder}`, "
            "or overwrite it with --force."
        )
    if not (folder / "config.toml").is_file():
        raise UsageError(f"{folder} holds files but no coterie result; --force empties only result folders.")


def prepare(folder: Path, *, force: bool) -> None:
    """Make an empty result folder; one with content is refused, or emptied with force if it is a result folder."""
    check(folder, force=force)
    with at_work_in(folder):
        empty(folder, force=force)


def empty(folder: Path, *, force: bool) -> None:
    """As `prepare`, for one who is at work in the folder."""
    check(folder, force=force)
    try:
        # config.toml says that this is a result folder, so it goes last
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.toml"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        raise _unwritable(folder, error) from None


@contextmanager
def at_work_in(folder: Path, again: str = "", patience: float = 0.0) -> Iterator[None]:
    """Alone in a folder, which is made if it is not there. The error of Ctrl-C or SIGTERM says how to resume.

    Args:
        folder: a result folder, or the folder of many runs.
        again: how the user resumes; by default with `coterie resume`.
        patience: how many seconds to wait for another who is at work there to end.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        with terminable(), sole_user(folder, patience):
            yield
    except KeyboardInterrupt:
        resume = again or f"coterie resume {folder}"
        raise RunError(f"stopped; what was saved is intact. Resume it with: {resume}") from None


@contextmanager
def at_work_on(folder: Path, plan: str, *, force: bool) -> Iterator[None]:
    """At work in the folder of many runs: a new one, or one that holds their plan and is resumed.

    Args:
        folder: where the runs are.
        plan: the name of the file that says what was begun.
        force: whether to empty the folder first.
    """
    begun = (folder / plan).is_file() and not force
    if not begun:
        check(folder, force=force)
    with at_work_in(folder):
        if not begun:
            empty(folder, force=force)
        yield


def _unwritable(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"{folder} cannot be written: {error.strerror or error}. Choose another --out.")


def read_plan(path: Path, *keys: str) -> list[Any]:
    """What a command that makes many runs has left for its resumption, by keys."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        return [plan[key] for key in keys]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} does not say what to resume ({gist(error)}); use the same command with --out {path.parent}."
        ) from None


def rounds_done(folder: Path) -> int:
    """How far a run has come, by what it has recorded."""
    try:
        with (folder / RECORD).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            lines = file.read().split(b"\n")
        return int(json.loads(lines[-2])["round"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return 0  # not begun, or a line that is longer than the tail


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A record file that grew line by line; every line has its round."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [{**line, "round": int(line["round"])} for line in lines]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}. Start again in a new folder.") from None


class Records:
    """Open record files of one run, cut back to the lengths that a checkpoint knows."""

    def __init__(self, folder: Path, lengths: Mapping[str, int]) -> None:
        self.folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._on_disk: dict[str, int] = {}
        for name in GROWING:  # all of them, before the first is cut
            _check_length(folder / name, lengths.get(name, 0))
        with ExitStack() as opened:
            opened.callback(self.close)
            try:
                for name in GROWING:
                    path = folder / name
                    self._files[name] = path.open("r+b" if path.exists() else "w+b")
            except OSError as error:
                raise UsageError(f"{folder} cannot be written: {error.strerror or error}.") from None
            self.cut(lengths)
            opened.pop_all()

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def metrics(self, line: dict[str, Any]) -> None:
        """One recorded round."""
        self._write(RECORD, json.dumps(line))

    def event(self, line: dict[str, Any]) -> None:
        """One client failure, rejected update, skipped round or resume."""
        self._write("events.jsonl", json.dumps(line))

    def weights(self, round: int, weights: Tensor) -> None:
        """One row of weights, or one row per target of a matrix; the header names the clients."""
        matrix = weights.dim() == 2
        if self._files["weights.csv"].tell() == 0:
            keys = ["round", "target"] if matrix else ["round"]
            self._write("weights.csv", ",".join([*keys, *(f"client_{k}" for k in range(weights.shape[-1]))]))
        for target, row in enumerate(weights.tolist() if matrix else [weights.tolist()]):
            keys = [str(round), str(target)] if matrix else [str(round)]
            self._write("weights.csv", ",".join([*keys, *(f"{w:.9g}" for w in row)]))

    def _write(self, name: str, line: str) -> None:
        with self._saving(self.folder / name):
            self._files[name].write(line.encode() + b"\n")

    def lengths(self) -> dict[str, int]:
        """How long the files are, with what is not on disk yet."""
        return {name: file.tell() for name, file in self._files.items()}

    def cut(self, lengths: Mapping[str, int]) -> None:
        """Back to an earlier state."""
        self._on_disk.clear()
        with self._saving(self.folder):
            for name, file in self._files.items():
                file.flush()
                file.truncate(lengths.get(name, 0))
                file.seek(lengths.get(name, 0))

    def flush(self) -> None:
        """Everything to disk."""
        with self._saving(self.folder):
            for name, file in self._files.items():
                if file.tell() != self._on_disk.get(name):
                    file.flush()
                    os.fsync(file.fileno())
                    self._on_disk[name] = file.tell()

    def close(self) -> None:
        """Close the files, all of them, even if what was still to be written does not fit."""
        with self._saving(self.folder), ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)

    @contextmanager
    def _saving(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise RunError(f"{path} cannot be written: {reason}. What was saved before is intact.") from None


def _check_length(path: Path, length: int) -> None:
    found = path.stat().st_size if path.exists() else 0
    if found < length:
        raise UsageError(
            f"{path} is {found} bytes long, but the checkpoint was made at {length}; it was cut or replaced. "
            "Restore it, or start again in a new folder with this folder's config.toml."
        )


def save_model(path: Path, state_dict: dict[str, Tensor], about: dict[str, str]) -> None:
    """Parameters by name, as plain PyTorch would save them, in safetensors."""
    tensors = {name: t.detach().contiguous().cpu() for name, t in state_dict.items()}
    write_atomically(path, tensor_bytes(tensors, about))
