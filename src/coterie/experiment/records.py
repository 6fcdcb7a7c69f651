"""The result folder: record files that only grow, and that a resumed run cuts back to its checkpoint."""

import json
import os
import shutil
from pathlib import Path
from typing import IO, Any

from safetensors.torch import save as save_tensors
from torch import Tensor

from coterie.errors import RunError, UsageError
from coterie.experiment.files import write_atomically

GROWING = ("metrics.jsonl", "weights.csv", "events.jsonl")


def prepare(folder: Path, *, force: bool) -> None:
    """Make an empty result folder; one with content is refused, or emptied with force if it is a result folder."""
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; name a folder with --out.")
        if folder.is_dir() and any(folder.iterdir()):
            if not force:
                raise UsageError(
                    f"{folder} is not empty; choose another --out, continue with `coterie resume {folder}`, "
                    "or overwrite it with --force."
                )
            if not (folder / "config.toml").is_file():
                raise UsageError(f"{folder} holds files but no coterie result; --force empties only result folders.")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}. Choose another --out.") from None


class Records:
    """Open record files of one run."""

    def __init__(self, folder: Path, lengths: dict[str, int] | None = None) -> None:
        self.folder = folder
        self._files: dict[str, IO[bytes]] = {}
        for name in GROWING:
            self._files[name] = _opened(folder / name, (lengths or {}).get(name, 0))

    def metrics(self, line: dict[str, Any]) -> None:
        """One recorded round."""
        self._write("metrics.jsonl", json.dumps(line))

    def event(self, line: dict[str, Any]) -> None:
        """One client failure, rejected update, skipped round or resume."""
        self._write("events.jsonl", json.dumps(line))

    def weights(self, round: int, weights: Tensor) -> None:
        """One row of weights; the header names the clients."""
        if self._files["weights.csv"].tell() == 0:
            self._write("weights.csv", ",".join(["round", *(f"client_{k}" for k in range(len(weights)))]))
        self._write("weights.csv", ",".join([str(round), *(f"{w:.9g}" for w in weights.tolist())]))

    def _write(self, name: str, line: str) -> None:
        try:
            self._files[name].write(line.encode() + b"\n")
        except OSError as error:
            raise RunError(f"{self.folder / name} cannot be written: {error.strerror or error}.") from None

    def flush(self) -> dict[str, int]:
        """Everything to disk; the lengths go into the checkpoint."""
        try:
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"{self.folder} cannot be written: {error.strerror or error}.") from None
        return {name: file.tell() for name, file in self._files.items()}

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def _opened(path: Path, length: int) -> IO[bytes]:
    """A record file, cut back to the length the checkpoint knows."""
    found = path.stat().st_size if path.exists() else 0
    if found < length:
        raise UsageError(
            f"{path} is {found} bytes long, but the checkpoint was made at {length}; it was cut or replaced. "
            "Restore it, or start again in a new folder with this folder's config.toml."
        )
    file = path.open("r+b" if path.exists() else "w+b")
    file.truncate(length)
    file.seek(length)
    return file


def save_model(path: Path, state_dict: dict[str, Tensor], about: dict[str, str]) -> None:
    """Parameters by name, as plain PyTorch would save them, in safetensors."""
    tensors = {name: t.detach().contiguous().cpu() for name, t in state_dict.items()}
    write_atomically(path, save_tensors(tensors, about))
