"""Checkpoints: everything needed to go on as if nothing had happened, in one safetensors file.

The method's state and the clients' memory are the tensors; round, ledger, seconds and the lengths of the record files
are JSON in the header, with the configuration they belong to and a checksum over all. The two newest checkpoints are
kept, so that a damaged one falls back to the one before. No pickle.
"""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from coterie.errors import UsageError
from coterie.federation.ledger import Ledger
from coterie.federation.tree import Tree, mapped, named_leaves, tree_flatten, tree_leaves, tree_unflatten
from coterie.federation.work import Handle, Memory
from coterie.methods.shared.staged import StagedState
from coterie.storage import make_folder, tensor_bytes, write_atomically

VERSION = 1
KEEP = 2
ERRORS = re.compile(r"stages\['compression'\]\.errors\['([^']+)'\]@clients")  # one for each upload so far
LOOP = "loop@"  # before the names of tensors that belong to the loop, not to the method's state
MAY_CHANGE = {
    "version",
    "run.compile",
    "run.rounds",
    "run.record",
    "run.evaluate",
    "run.checkpoint",
    "run.baselines",
    "run.budget",
    "run.exchanges",
    "run.log",
    "run.stop",
} | {
    "federation.chunk",  # the bits do not depend on it
    "federation.memory",
    *(f"federation.{name}" for name in ("timeout", "retries", "quorum", "patience")),
    *("engine.address", "engine.workers"),
}


class Progress(NamedTuple):
    """How far a run has come: rounds done, seconds spent, traffic, the lengths of the record files, and what else the
    loop knows, as plain data and as tensors."""

    rounds: int
    seconds: float
    ledger: dict[str, Any]
    lengths: dict[str, int]
    more: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    tensors: dict[str, Tensor] = {}  # noqa: RUF012


class Damaged(Exception):
    """A checkpoint that cannot be trusted, and why."""


def save(folder: Path, state: Tree, progress: Progress, settings: Mapping[str, Any]) -> None:
    """Write the checkpoint of a round and drop all but the newest two. settings are {'table.key': plain value}."""
    make_folder(folder)
    tensors, plain = _encode(state)
    tensors |= {f"{LOOP}{name}": t.detach().contiguous().cpu().clone() for name, t in progress.tensors.items()}
    counts = {name: value for name, value in progress._asdict().items() if name != "tensors"}
    content = {"version": VERSION, "settings": settings, "plain": plain, **counts}
    header = json.dumps(content, sort_keys=True)
    metadata = {"coterie": header, "sha256": _checksum(header, tensors)}
    write_atomically(folder / f"{progress.rounds:08d}.safetensors", tensor_bytes(tensors, metadata))
    for old in _newest_first(folder)[KEEP:]:
        old.unlink(missing_ok=True)


def load(folder: Path, template: Tree, settings: Mapping[str, Any]) -> tuple[Tree, Progress, list[str]] | None:
    """The newest checkpoint that can be trusted, in the form of the template, and what was wrong with newer ones.

    It must have been made with these settings, but for those of how long and how often; settings that only one side
    knows are of another version of coterie. None if there is no checkpoint at all; an error if there are some and
    none can be trusted.
    """
    complaints: list[str] = []
    candidates = _newest_first(folder)
    for path in candidates:
        try:
            return (*_read(path, template, settings), complaints)
        except Damaged as error:
            complaints.append(f"{path.name}: {error}")
    if not candidates:
        return None
    raise UsageError(
        f"no checkpoint in {folder} can be used ({'; '.join(complaints)}). "
        "Start again in a new folder with the config.toml of this one: coterie run OLD/config.toml --out NEW."
    )


def available(folder: Path) -> bool:
    """Whether there is something to resume."""
    return bool(_newest_first(folder))


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.safetensors"), reverse=True) if folder.is_dir() else []


def _read(path: Path, template: Tree, settings: Mapping[str, Any]) -> tuple[Tree, Progress]:
    try:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > len(data) - 8:
            raise Damaged("it is cut off")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        header = metadata["coterie"]
        tensors = load_tensors(data)
        if metadata["sha256"] != _checksum(header, tensors):
            raise Damaged("its checksum does not match; it was changed or damaged")
        content = json.loads(header)
        if content["version"] > VERSION:
            raise Damaged(f"it is of version {content['version']}, newer than this coterie reads ({VERSION})")
        _compare(content["settings"], settings)
        rounds, seconds, ledger, lengths = (content[name] for name in ("rounds", "seconds", "ledger", "lengths"))
        own = {name.removeprefix(LOOP): t for name, t in tensors.items() if name.startswith(LOOP)}
        progress = _sound(Progress(rounds, seconds, ledger, lengths, content["more"], own))
        if isinstance(template, StagedState):
            template = _with_errors(template, tensors)
        return _decode(template, tensors, content["plain"]), progress
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Damaged(f"it is not a readable checkpoint ({type(error).__name__})") from None


def _with_errors(template: StagedState, tensors: dict[str, Tensor]) -> StagedState:
    """The template with an error for each upload of the checkpoint; a state has none before its first round."""
    state = template.stages.get("compression")
    if state is None:
        return template
    device = next((leaf.device for leaf in tree_leaves(template) if isinstance(leaf, Tensor)), None)
    found = {match[1]: rows for name, rows in tensors.items() if (match := ERRORS.fullmatch(name))}
    for name, rows in found.items():
        if rows.dim() != 2 or len(rows) != state.clients or not rows.is_floating_point():
            raise Damaged(f"its error of {name} does not fit the configuration")
    errors = {name: Memory(rows.to(device)) for name, rows in found.items()}
    return template._replace(stages={**template.stages, "compression": state._replace(errors=errors)})


def _sound(progress: Progress) -> Progress:
    """The same, if numbers are numbers and the ledger is one."""
    counts = (progress.rounds, *progress.lengths.values())
    if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(progress.seconds, int | float):
        raise Damaged("what it says of its progress is not of this form")
    Ledger.from_dict(progress.ledger)
    return progress


def _compare(made: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another configuration, by the first setting that differs."""
    wanted = json.loads(json.dumps(wanted))
    for key in sorted((made.keys() & wanted.keys()) - MAY_CHANGE):
        if made[key] != wanted[key]:
            raise Damaged(f"it was made with {key} = {made[key]!r}, but config.toml says {wanted[key]!r}")


def _encode(state: Tree) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for name, leaf in named_leaves(state):
        if isinstance(leaf, Memory):
            inside = leaf.payload
            if isinstance(inside, Handle):  # the rows lie at the nodes
                tensors[f"{name}@versions"] = inside.versions.cpu()
                inside = mapped(_compact, inside.start)
            for inner, tensor in named_leaves(inside):
                tensors[f"{name}@clients{inner}"] = tensor.detach().contiguous().cpu()
        elif isinstance(leaf, Tensor):
            tensors[name] = leaf.detach().contiguous().cpu()
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            plain[name] = leaf
        else:
            raise TypeError(
                f"the state's {name} is a {type(leaf).__name__}; states hold tensors, memory and plain data"
            )
    # two names of one storage would be refused: each gets its own
    return {name: t.clone() for name, t in tensors.items()}, plain


def _compact(rows: Tensor) -> Tensor:
    """One row where all are one and the same."""
    return rows[:1] if rows.stride(0) == 0 else rows


def _decode(template: Tree, tensors: dict[str, Tensor], plain: dict[str, Any]) -> Tree:
    def tensor(name: str, like: Tensor) -> Tensor:
        found = tensors.get(name)
        if found is None or found.shape != like.shape or found.dtype != like.dtype:
            raise Damaged(f"its {name} does not fit the configuration")
        return found.to(like.device)

    leaves: list[Any] = []
    for name, leaf in named_leaves(template):
        if isinstance(leaf, Memory):
            structure = tree_flatten(leaf.payload)[1]
            versions = tensors.get(f"{name}@versions")
            if versions is None:
                inner = [tensor(f"{name}@clients{path}", like) for path, like in named_leaves(leaf.payload)]
                leaves.append(Memory(tree_unflatten(inner, structure)))
                continue
            each = [(f"{name}@clients{path}", like) for path, like in named_leaves(leaf.payload)]
            inner = [tensor(path, like[: len(tensors.get(path, like))]).expand(like.shape) for path, like in each]
            if versions.dtype != torch.int64 or any(like.shape[:1] != versions.shape for _, like in each):
                raise Damaged(f"its {name} does not fit the configuration")
            leaves.append(Memory(Handle(tree_unflatten(inner, structure), versions.to(inner[0].device))))
        elif isinstance(leaf, Tensor):
            leaves.append(tensor(name, leaf))
        elif name in plain:
            leaves.append(plain[name])
        else:
            raise Damaged(f"it lacks {name}")
    return tree_unflatten(leaves, tree_flatten(template)[1])


def _checksum(header: str, tensors: dict[str, Tensor]) -> str:
    digest = sha256(header.encode())
    for name in sorted(tensors):
        digest.update(f"{name}{tuple(tensors[name].shape)}{tensors[name].dtype}".encode())
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
