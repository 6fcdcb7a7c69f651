"""Sketches: linear, adjoint, fixed by their seed, and of the norm that they claim."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from coterie.errors import UsageError
from coterie.numerics import Draw
from coterie.numerics.sketches import (
    TILE,
    CountSketch,
    Gaussian,
    Hadamard,
    SparseSign,
    power_iteration,
    sketch,
    walsh_hadamard,
)
from coterie.numerics.sparse import Sparse, top_k

D, P = 205, 70
ALL = [
    Gaussian(P, D, 3),
    Hadamard(P, D, 3),
    SparseSign(P, D, 3),
    SparseSign(P, D, 3, nonzeros=1),
    CountSketch(5, 14, D, 3),
]
every = pytest.mark.parametrize("S", ALL, ids=lambda S: type(S).__name__ + str(getattr(S, "nonzeros", "")))
wide = {"dtype": torch.float64}


def vectors(n, d, name="v", dtype=torch.float64):
    return Draw.of(0).phase(name).normal(n, d, dtype=dtype)


def matrix(S):
    return S.apply(torch.eye(S.dimension, **wide)).T


@every
def test_the_adjoint_is_the_transpose(S):
    v, x = vectors(4, D), vectors(4, P, "x")
    torch.testing.assert_close((S.apply(v) * x).sum(1), (v * S.adjoint(x)).sum(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(S.adjoint(torch.eye(P, **wide)), matrix(S), rtol=0, atol=1e-14)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_a_batch_and_vmap_give_what_single_vectors_give(S, dtype):
    v, x = vectors(3, D, dtype=dtype), vectors(3, P, "x", dtype=dtype)
    for f, batch in ((S.apply, v), (S.adjoint, x)):
        assert f(batch).dtype == dtype
        one_by_one = torch.stack([f(row) for row in batch])
        torch.testing.assert_close(f(batch), one_by_one, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(vmap(f)(batch), one_by_one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["gaussian", "hadamard", "sign"])
def test_a_sketch_is_a_function_of_its_seed(kind):
    make = {"gaussian": Gaussian, "hadamard": Hadamard, "sign": SparseSign}[kind]
    v = vectors(1, D)[0]
    assert torch.equal(make(P, D, 5).apply(v), make(P, D, 5).apply(v))
    assert torch.equal(make(P, D, 5).apply(v), sketch(kind, P, D, 5).apply(v))
    other = make(P, D, 6).apply(v)
    cosine = (make(P, D, 5).apply(v) @ other) / (make(P, D, 5).apply(v).norm() * other.norm())
    assert abs(float(cosine)) < 0.5


@every
def test_rows_have_unit_length(S):
    rows = matrix(S).square().sum(1)
    if isinstance(S, CountSketch):
        assert torch.equal(matrix(S).abs().sum(0), torch.full((D,), 5.0, **wide))  # one bucket a row of the table
        return
    assert abs(float(rows.mean()) - 1.0) < (0.02 if isinstance(S, Gaussian) else 1e-2)
    if S.orthogonal:
        torch.testing.assert_close(matrix(S) @ matrix(S).T, torch.eye(P, **wide), rtol=0, atol=1e-12)


def test_which_sketches_are_orthogonal():
    assert [S.orthogonal for S in ALL[:4]] == [False, True, False, True]


@pytest.mark.parametrize("d", [3, 5, 64, 127, 128, 129, 1000])
def test_hadamard_is_orthogonal_for_every_dimension(d):
    S = Hadamard(d - 1, d, 1)
    torch.testing.assert_close(matrix(S) @ matrix(S).T, torch.eye(d - 1, **wide), rtol=0, atol=1e-12)
    assert len(set(S.rows.tolist())) == d - 1


@pytest.mark.parametrize("n", [1, 2, 64, 128, 8192])
def test_walsh_hadamard_is_its_own_inverse_and_has_entries_of_one_size(n):
    v = vectors(2, n)
    torch.testing.assert_close(walsh_hadamard(walsh_hadamard(v)), v, rtol=0, atol=1e-12)
    first = torch.zeros(n, **wide)
    first[n // 3] = 1.0
    torch.testing.assert_close(walsh_hadamard(first).abs(), torch.full((n,), n**-0.5, **wide))


@pytest.mark.parametrize("S", ALL[:4], ids=lambda S: type(S).__name__)
def test_the_claimed_norm_is_a_bound_and_not_far_off(S):
    norm = float(torch.linalg.matrix_norm(matrix(S), 2)) ** 2
    assert norm <= S.norm_squared * (1 + 1e-9)
    assert S.norm_squared < 1.6 * norm
    found = power_iteration(S, steps=200)
    assert 0.97 * norm < found <= norm * (1 + 1e-9)


@pytest.mark.parametrize("p", [1, TILE - 1, TILE, TILE + 1, 3 * TILE + 5])
def test_what_a_gaussian_sketch_keeps_changes_no_bit(p):
    v, x = vectors(2, D, dtype=torch.float32), vectors(2, p, "x", dtype=torch.float32)
    forgetful, half, keeping = (Gaussian(p, D, 7, kept=kept) for kept in (0, 4 * TILE * D, 1 << 30))
    for S in (half, keeping):
        for _ in range(2):
            assert torch.equal(S.apply(v), forgetful.apply(v))
            assert torch.equal(S.adjoint(x), forgetful.adjoint(x))
    assert len(forgetful._tiles) == 0
    assert len(half._tiles) == 1
    assert len(keeping._tiles) == -(-p // TILE)


def test_a_row_of_a_gaussian_sketch_does_not_depend_on_how_many_there_are():
    few, many = Gaussian(5, D, 7), Gaussian(TILE + 3, D, 7)
    assert torch.equal(few.tile(0), many.tile(0)[:5])


def test_gaussian_entries_are_gaussian():
    entries = Gaussian(200, 500, 1).adjoint(torch.eye(200, **wide)).flatten() * 500**0.5
    for power, expected in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert abs(float((entries**power).mean()) - expected) < 0.1


@pytest.mark.parametrize("size", [0, -3, 10, 11])
def test_a_size_that_saves_nothing_is_refused(size):
    with pytest.raises(UsageError, match="at least 1 and below 10"):
        sketch("hadamard", size, 10, 0)


def test_an_unknown_kind_is_refused():
    with pytest.raises(UsageError, match="did you mean gaussian"):
        sketch("gausian", 3, 10, 0)


def test_a_count_sketch_recovers_heavy_hitters():
    d, heavy = 2000, [3, 500, 1200, 1999]
    v = 0.01 * vectors(1, d)[0]
    v[heavy] = torch.tensor([1.0, -2.0, 3.0, -1.5], **wide)
    S = CountSketch(5, 100, d, 0)
    found = S.estimate(S.apply(v))
    assert sorted(top_k(found, 4).places.tolist()) == heavy
    torch.testing.assert_close(found[heavy], v[heavy], rtol=0, atol=0.15)
    torch.testing.assert_close(S.estimate(torch.stack([S.apply(v), S.apply(2 * v)]))[1], 2 * found)


def test_the_median_of_an_even_number_of_rows_is_the_mean_of_the_middle_two():
    S = CountSketch(2, 30, D, 0)
    table = S.apply(vectors(1, D)[0])
    torch.testing.assert_close(S.estimate(table), S.adjoint(table) / 2)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30), st.data())
def test_top_k_contracts(values, data):
    v = torch.tensor(values, **wide)
    k = data.draw(st.integers(1, len(values)))
    sparse = top_k(v, k)
    kept = sparse.dense(len(v))
    assert sparse.places.dtype == torch.int32
    lost = v - kept
    assert float(lost.square().sum()) <= (1 - k / len(v)) * float(v.square().sum()) * (1 + 1e-12)
    assert torch.equal(kept * lost, torch.zeros_like(v))
    assert float(lost.abs().max()) <= float(sparse.values.abs().min())


def test_sparse_vectors_are_those_of_each_row_under_vmap():
    v = vectors(3, 20)
    torch.testing.assert_close(vmap(lambda row: top_k(row, 4).dense(20))(v), top_k(v, 4).dense(20))
    assert torch.equal(Sparse.nothing(3, v).dense(5), torch.zeros(5, **wide))
