"""Checkpoints give back what was saved to the last bit, or are refused; never anything else."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from coterie.errors import RunError, UsageError
from coterie.experiment import checkpoint
from coterie.experiment.checkpoint import Progress
from coterie.federation import Memory
from coterie.federation.stages.compression import CompressionState
from coterie.federation.stages.privacy import PrivacyState
from coterie.methods.shared.staged import StagedState
from coterie.storage import sole_user, sweep, tensor_bytes, write_atomically

SETTINGS = {"run.rounds": 9, "run.seed": 0, "method.step": 0.1, "method.weights": (1, 2), "federation.norm": None}


class Anchor(NamedTuple):
    y: Tensor
    gradients: tuple[Tensor, ...]


class State(NamedTuple):
    x: Tensor
    w: Tensor
    memory: Memory
    step: int
    decay: float
    note: str | None
    odd: dict[str, Tensor]


def made(seed: int) -> State:
    """One of everything that a state may hold, awkward numbers too."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(5, generator=draw)
    x[0], x[1], x[2] = -0.0, 1e-42, torch.finfo(torch.float32).max
    anchor = Anchor(torch.randn(3, 5, generator=draw), (torch.randn(3, generator=draw).double(),))
    odd = {"scalar": torch.randn((), generator=draw), "flags": torch.tensor([True, False]), "none": torch.zeros(0, 4)}
    whole = torch.randint(-9, 9, (2, 2), generator=draw).T
    return State(x, x[2:4], Memory(anchor), 3 + seed, 0.1 * seed, None if seed else "first", {**odd, "whole": whole})


def leaves(state: State) -> Iterator[Any]:
    anchor = state.memory.payload
    yield from (state.x, state.w, anchor.y, *anchor.gradients, *state.odd.values())
    yield from (state.step, state.decay, state.note)


def assert_same(one: State, two: State) -> None:
    assert type(one) is type(two)
    assert type(one.memory.payload) is type(two.memory.payload)
    for a, b in zip(leaves(one), leaves(two), strict=True):
        if isinstance(a, Tensor):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
        else:
            assert a == b


def progress(rounds: int) -> Progress:
    ledger = {"total": {"rounds": rounds}, "by_cause": {}}
    return Progress(rounds, 0.1 * rounds, ledger, {"metrics.jsonl": 10 * rounds})


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with the checkpoints of rounds 4 and 5."""
    for rounds in (3, 4, 5):
        checkpoint.save(tmp_path, made(rounds), progress(rounds), SETTINGS)
    return tmp_path


def test_round_trip(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "new", made(2), progress(7), SETTINGS)
    found, read, complaints = checkpoint.load(tmp_path / "new", made(0), SETTINGS)
    assert_same(found, made(2))
    assert (read, complaints) == (progress(7), [])


def test_memory_that_is_one_row_for_all_is_saved_for_each(tmp_path: Path) -> None:
    start = Memory.start(torch.arange(3.0), 4)
    checkpoint.save(tmp_path, (start,), progress(1), {})
    (found,), *_ = checkpoint.load(tmp_path, (start,), {})
    assert torch.equal(found.payload, torch.arange(3.0).expand(4, 3))


def test_the_two_newest_are_kept(two: Path) -> None:
    assert sorted(p.name for p in two.iterdir()) == ["00000004.safetensors", "00000005.safetensors"]
    assert checkpoint.load(two, made(0), SETTINGS)[1].rounds == 5


def test_none_is_none(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path, made(0), SETTINGS) is None
    assert checkpoint.load(tmp_path / "missing", made(0), SETTINGS) is None


def test_the_same_content_has_the_same_bytes() -> None:
    tensors = {"b": torch.zeros(3), "a": torch.ones(2, dtype=torch.int64)}
    about = {f"key{i}": str(i) for i in range(20)}
    assert len({tensor_bytes(tensors, dict(sorted(about.items(), key=lambda _: i))) for i in range(5)}) == 1
    places = [tensor_bytes(tensors, about).index(f'"key{i}"'.encode()) for i in (0, 1, 10, 2)]
    assert places == sorted(places)


def assert_not_trusted(folder: Path, data: bytes) -> None:
    """A newest checkpoint of these bytes gives exactly the one before, with a reason."""
    (folder / "00000005.safetensors").write_bytes(data)
    found, read, complaints = checkpoint.load(folder, made(0), SETTINGS)
    assert read == progress(4)
    assert_same(found, made(4))
    assert len(complaints) == 1
    assert complaints[0].startswith("00000005.safetensors: it")


def test_truncated_anywhere(two: Path) -> None:
    whole = (two / "00000005.safetensors").read_bytes()
    lengths = {*range(40), *range(40, len(whole), 17), len(whole) - 1, len(whole) - 4}
    for length in sorted(lengths):
        assert_not_trusted(two, whole[:length])
    for more in (b"\0", b"x" * 100):
        assert_not_trusted(two, whole + more)


def test_a_flipped_bit_anywhere(two: Path) -> None:
    whole = (two / "00000005.safetensors").read_bytes()
    for place in range(0, len(whole), 2):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place // 2 % 8
        assert_not_trusted(two, bytes(damaged))


def rewritten(data: bytes, old: bytes, new: bytes) -> bytes:
    """Another header of the same length, as somebody with an editor would make it."""
    assert len(old) == len(new)
    assert data.count(old) >= 1
    return data.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (rb"\"rounds\": 5", rb"\"rounds\": 7"),
        (rb"\"metrics.jsonl\": 50", rb"\"metrics.jsonl\": 10"),
        (rb"\"version\": 1", rb"\"version\": 0"),
        (rb"\"seconds\": 0.5", rb"\"seconds\": 0.6"),
        (rb"\"method.step\": 0.1", rb"\"method.step\": 0.2"),
        (rb"\"step\": 8", rb"\"step\": 9"),
        (b'"sha256"', b'"sha255"'),
        (b'"coterie"', b'"coteria"'),
        (b'"F64"', b'"I64"'),
    ],
)
def test_tampered_metadata(two: Path, old: bytes, new: bytes) -> None:
    assert_not_trusted(two, rewritten((two / "00000005.safetensors").read_bytes(), old, new))


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        {"version": "one"},
        {"version": 99},
        {"version": 1, "settings": {}, "plain": {}, "rounds": 5, "seconds": 0.0, "ledger": {}, "lengths": {}},
        {"version": 1, "settings": [], "plain": {}, "rounds": 5, "seconds": 0.0, "ledger": {}, "lengths": {}},
    ],
)
def test_a_forged_checkpoint_with_a_right_checksum(two: Path, content: Any) -> None:
    header = json.dumps(content)
    tensors = {"x": torch.zeros(5)}
    assert_not_trusted(two, tensor_bytes(tensors, {"coterie": header, "sha256": checkpoint._checksum(header, tensors)}))


def test_where_none_can_be_trusted_the_reasons_are_given(two: Path) -> None:
    for path in two.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match=r"00000005.*cut off.*00000004.*cut off.*Start again in a new folder"):
        checkpoint.load(two, made(0), SETTINGS)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"run.seed": 1}, "made with run.seed = 0, but config.toml says 1"),
        ({"method.step": 0.2}, "made with method.step = 0.1, but config.toml says 0.2"),
        ({"federation.norm": 5.0}, "made with federation.norm = None, but config.toml says 5.0"),
        ({"method.weights": [1, 3]}, "made with method.weights"),
    ],
)
def test_the_checkpoint_of_another_configuration_is_refused(two: Path, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        checkpoint.load(two, made(0), {**SETTINGS, **change})


def test_more_rounds_and_settings_of_another_version_are_no_other_configuration(two: Path) -> None:
    settings = {**SETTINGS, "run.rounds": 100, "run.brand_new": 1, "method.weights": [1, 2]}
    del settings["method.step"]
    assert checkpoint.load(two, made(0), settings)[1].rounds == 5


def test_a_state_of_another_shape_is_refused(two: Path) -> None:
    other = made(0)
    for wrong in (
        other._replace(x=torch.zeros(6)),
        other._replace(x=other.x.double()),
        other._replace(memory=Memory(Anchor(torch.zeros(4, 5), other.memory.payload.gradients))),
        other._replace(odd={**other.odd, "more": torch.zeros(1)}),
    ):
        with pytest.raises(UsageError, match="does not fit the configuration"):
            checkpoint.load(two, wrong, SETTINGS)


def test_states_hold_tensors_memory_and_plain_data_only(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"the state's .* is a complex"):
        checkpoint.save(tmp_path, (torch.zeros(1), 1j), progress(1), {})


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    for name in ("fsync", "replace", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(f"os.{name}", _full)
            with pytest.raises(RunError, match=r"file cannot be written: No space left on device\. What was saved"):
                write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(RunError, match="cannot be written"):
        write_atomically(path / "below", b"new")
    with pytest.raises(RunError, match="cannot be made"):
        checkpoint.save(path / "below", made(0), progress(1), {})


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_leftovers_of_a_killed_process_are_swept(two: Path) -> None:
    names = {path.name for path in two.iterdir()}
    (two / ".00000006.safetensors.abc.tmp").write_bytes(b"half")
    sweep(two)
    assert {path.name for path in two.iterdir()} == names


def test_a_folder_has_one_user_at_a_time(tmp_path: Path) -> None:
    with sole_user(tmp_path), pytest.raises(UsageError, match="another coterie is at work"), sole_user(tmp_path):
        pass
    with sole_user(tmp_path):
        pass


class Inner(NamedTuple):
    """A method's state whose field has the name of another one of stages."""

    x: torch.Tensor
    uploads: int


def test_the_states_of_stages_come_back(tmp_path: Path) -> None:
    rows, uploads = Memory(torch.arange(6.0).reshape(3, 2)), torch.tensor([3, 4, 5])
    stages: dict[str, Any] = {
        "privacy": PrivacyState(uploads, 2),
        "compression": CompressionState(3, {"own:work/1": rows}),
    }
    checkpoint.save(tmp_path, StagedState(Inner(torch.ones(2), 7), stages), progress(1), {})
    blank = {"privacy": PrivacyState(torch.zeros_like(uploads)), "compression": CompressionState(3, {})}
    loaded = checkpoint.load(tmp_path, StagedState(Inner(torch.zeros(2), 0), blank), {})
    assert loaded is not None
    state = loaded[0]
    assert torch.equal(state.inner.x, torch.ones(2))
    assert state.inner.uploads == 7
    assert torch.equal(state.stages["privacy"].uploads, uploads)
    assert state.stages["privacy"].at_once == 2
    clients, errors = state.stages["compression"]
    assert clients == 3
    assert errors.keys() == {"own:work/1"}
    assert torch.equal(errors["own:work/1"].payload, rows.payload)


def test_errors_of_another_number_of_clients_are_refused(tmp_path: Path) -> None:
    template = StagedState(torch.zeros(2), {"compression": CompressionState(3, {})})
    wrong = StagedState(torch.zeros(2), {"compression": CompressionState(3, {"own:work/1": Memory(torch.zeros(4, 2))})})
    checkpoint.save(tmp_path, wrong, progress(1), {})
    with pytest.raises(UsageError, match="its error of own:work/1 does not fit the configuration"):
        checkpoint.load(tmp_path, template, {})
