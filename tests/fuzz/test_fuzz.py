"""Whatever is read is accepted or refused with a reason; projections and draws keep their promises for any numbers."""

import gzip
import math
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from targets import TARGETS, Target, mutated

from coterie.errors import CoterieError, UsageError
from coterie.experiment.config import TABLES, load
from coterie.numerics import Draw
from coterie.numerics.simplex import entropic_step, project_capped_simplex, project_simplex
from coterie.problems.data import files
from coterie.problems.data.covtype import read_table
from coterie.problems.data.files import content

shared_folder = settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
targets = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


def test_examples_are_the_same_in_every_run_and_have_no_deadline() -> None:
    assert (settings.default.derandomize, settings.default.deadline) == (True, None)
    assert HealthCheck.too_slow in settings.default.suppress_health_check


@targets
def test_a_sound_example_is_accepted(target: Target, tmp_path: Path) -> None:
    first = target.seeds()[0]
    assert target.accepts(first, tmp_path)
    if target.name not in ("checkpoint", "settings (--set)"):
        assert target.accepts(gzip.compress(first), tmp_path) is (target.name != "configuration file")


@targets
@shared_folder
@given(number=st.integers(0, 2**32))
def test_a_mutated_input_is_accepted_or_refused(target: Target, tmp_path: Path, number: int) -> None:
    target.accepts(mutated(target, number), tmp_path)


@targets
@settings(shared_folder, max_examples=25)
@given(data=st.binary(max_size=300))
@example(data=b"")
@example(data=b"\x1f\x8b")
def test_any_bytes_are_accepted_or_refused(target: Target, tmp_path: Path, data: bytes) -> None:
    target.accepts(data, tmp_path)


@targets
def test_mutations_reach_what_is_refused(target: Target, tmp_path: Path) -> None:
    """Else the tests above would prove nothing."""
    said = {target.accepts(mutated(target, number), tmp_path) for number in range(60)}
    assert False in said


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
keys = st.sampled_from(["method", "problem", "rounds", "seed", "step", "active", "norm", "clip", "crash", "noise"])
tables = st.dictionaries(
    st.sampled_from(TABLES) | st.text(max_size=4), st.dictionaries(keys | st.text(max_size=4), values), max_size=4
)


@shared_folder
@given(content=tables)
def test_any_toml_is_a_configuration_or_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(_without_none(content)), encoding="utf-8")
    try:
        found = load(path)
    except UsageError:
        return
    path.write_text(found.as_toml(), encoding="utf-8")
    assert load(path) == found


@shared_folder
@given(pairs=st.dictionaries(st.text(max_size=12) | st.sampled_from(["method.step", "run.rounds"]), values, max_size=3))
def test_any_setting_is_taken_or_refused(pairs: dict[str, Any]) -> None:
    with suppress(CoterieError):
        load(sets=pairs)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value if v is not None] if isinstance(value, list) else value


# bombs


@pytest.mark.parametrize("line", [b"", b"1" * 54 + b"\n", b"1," * 54 + b"1\n"], ids=["no lines", "digits", "rows"])
@pytest.mark.parametrize("reader", [content, read_table], ids=["whole", "lines"])
def test_a_gzip_bomb_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Callable[[Path], Any], line: bytes
) -> None:
    """16 MiB out of a few kilobytes: what is held stays below twice the limit."""
    limit = 4 << 20
    monkeypatch.setattr(files, "LARGEST", limit)
    monkeypatch.setattr(files, "BLOCK", 1 << 16)
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(line * (4 * limit // len(line)) if line else bytes(4 * limit)))
    assert path.stat().st_size < limit / 16
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=r"damaged: .*(holds more than 4 MiB|a line of 64 KiB|columns|convert)"):
            reader(path)
        assert tracemalloc.get_traced_memory()[1] < 2 * limit
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [(2**32 - 1,) * 3, (2**31, 2, 2**31), (0, 2**32 - 1, 1)])
def test_sizes_that_overflow_ask_for_no_memory(tmp_path: Path, shape: tuple[int, ...]) -> None:
    header = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in shape)
    (target,) = (target for target in TARGETS if target.name == "idx images")
    tracemalloc.start()
    try:
        assert not target.accepts(header + bytes(16), tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20  # one block is read at a time
    finally:
        tracemalloc.stop()


# projections and draws

reals = st.floats(-1e150, 1e150, allow_nan=False)
vectors = st.lists(reals, min_size=1, max_size=8)
quick = settings(max_examples=80)


@quick
@given(v=vectors)
def test_any_vector_is_projected_onto_the_simplex(v: list[float]) -> None:
    w = project_simplex(torch.tensor(v, dtype=torch.float64))
    assert bool((w >= 0.0).all())
    assert float(w.sum()) == pytest.approx(1.0, abs=1e-12)
    torch.testing.assert_close(project_simplex(w), w, rtol=0.0, atol=1e-12)


@quick
@given(v=vectors, slack=st.floats(1.0, 3.0))
def test_any_vector_is_projected_onto_the_capped_simplex(v: list[float], slack: float) -> None:
    cap = min(1.0, slack / len(v))
    w = project_capped_simplex(torch.tensor(v, dtype=torch.float64), cap)
    assert bool((w >= 0.0).all())
    assert float(w.max()) <= cap + 1e-12
    assert float(w.sum()) == pytest.approx(1.0, abs=1e-9)


@quick
@given(v=vectors, step=st.floats(1e-9, 1e9))
def test_an_entropic_step_of_any_size_stays_on_the_simplex(v: list[float], step: float) -> None:
    g = torch.tensor(v, dtype=torch.float64)
    w = entropic_step(torch.full_like(g, 1.0 / len(v)), g, step)
    assert bool(torch.isfinite(w).all())
    assert float(w.sum()) == pytest.approx(1.0, abs=1e-9)
    assert float(w[g.argmin()]) >= 1.0 / len(v) - 1e-9


seeds = st.integers(-(2**80), 2**80)


@quick
@given(seed=seeds, client=st.integers(0, 2**40), high=st.integers(1, 2**31 - 1), n=st.integers(1, 60))
def test_draws_keep_their_promises_for_any_coordinates(seed: int, client: int, high: int, n: int) -> None:
    draw = Draw.of(seed).round(client).phase("any").client(client)
    u = draw.uniform(50, dtype=torch.float64)
    assert bool(((u >= 0.0) & (u < 1.0)).all())
    assert bool(torch.isfinite(draw.normal(50)).all())
    whole = draw.integers(high, 50)
    assert bool(((whole >= 0) & (whole < high)).all())
    assert draw.permutation(n).sort().values.tolist() == list(range(n))
    some = draw.subset(n, (n + 1) // 2)
    assert bool((some[1:] > some[:-1]).all())
    assert math.isclose(float(draw.sphere(n, dtype=torch.float64).norm()), 1.0, rel_tol=1e-9)
    assert torch.equal(u, Draw.of(seed).round(client).phase("any").client(client).uniform(50, dtype=torch.float64))
