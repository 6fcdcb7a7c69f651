"""Draws: the documented hash bit by bit, purity, and the distributions. Every seed is fixed, so nothing here flakes."""

import dataclasses
from itertools import permutations, product
from zlib import crc32

import numpy as np
import pytest
import torch
from scipy import stats

from coterie.numerics import Draw

IDS = torch.tensor([5, 0, 17, 3, 100_000])
COUNTS = torch.tensor([4, 9, 6, 12, 5])  # rows of each of the clients IDS
ROOT = Draw.of(7).round(3).phase("test")

# What may be asked of a draw; `count` is the client's own number of rows.
SAMPLERS = {
    "bits": lambda draw, count: draw.bits(3, 2),
    "one word": lambda draw, count: draw.bits(),
    "uniform": lambda draw, count: draw.uniform(5),
    "normal": lambda draw, count: draw.normal(4, 3),
    "normal float64": lambda draw, count: draw.normal(9, dtype=torch.float64),
    "sphere": lambda draw, count: draw.sphere(6),
    "bernoulli": lambda draw, count: draw.bernoulli(0.4, 8),
    "integers": lambda draw, count: draw.integers(1000, 7),
    "integers below count": lambda draw, count: draw.integers(count, 2, 3),
    "one integer below count": lambda draw, count: draw.integers(count),
    "batches": lambda draw, count: draw.batches(count, 4, 3),
    "permutation": lambda draw, count: draw.permutation(12),
    "permutation of count": lambda draw, count: draw.permutation(12, count),
    "subset": lambda draw, count: draw.subset(12, 5),
    "subset of count": lambda draw, count: draw.subset(12, 4, count),
    "step": lambda draw, count: draw.step(2).uniform(3),
}
every_sampler = pytest.mark.parametrize("sample", SAMPLERS.values(), ids=SAMPLERS.keys())


# ---- the hash


def mix(x):
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014) on numpy's uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
TAGS = {"seed": 1, "round": 2, "phase": 3, "client": 4, "step": 5}


def reference_words(count, **coordinates):
    """The first words at the given coordinates, folded in the order given."""
    key = np.zeros(1, np.uint64)
    for name, value in coordinates.items():
        value = crc32(value.encode()) if isinstance(value, str) else value % 2**64
        key = mix(mix(key * GOLDEN + np.uint64(TAGS[name])) ^ np.uint64(value))
    return mix(key + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN)


def words_of(draw, count):
    return draw.bits(count).numpy().view(np.uint64)


def test_words_after_key_zero_are_the_published_splitmix64_sequence():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert words_of(Draw(torch.zeros((), dtype=torch.int64)), 4).tolist() == published


@pytest.mark.parametrize("seed", [0, 1, 42, -1, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize(
    ("index", "phase", "client", "step"), [(0, "", 0, 0), (3, "batches", 17, 2), (10**6, "θ", 9, 1)]
)
def test_words_are_the_documented_hash_bit_by_bit(seed, index, phase, client, step):
    draw = Draw.of(seed).round(index).phase(phase).client(client).step(step)
    expected = reference_words(50, seed=seed, round=index, phase=phase, client=client, step=step)
    np.testing.assert_array_equal(words_of(draw, 50), expected)


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 24), (torch.float64, 53)])
def test_uniforms_are_the_leading_bits_of_the_words(dtype, digits):
    expected = (reference_words(200, seed=5, client=2) >> np.uint64(64 - digits)).astype(np.float64) * 2.0**-digits
    np.testing.assert_array_equal(Draw.of(5).client(2).uniform(200, dtype=dtype).double(), expected)


def test_integers_are_the_leading_31_bits_scaled():
    words = reference_words(200, seed=5, round=1) >> np.uint64(33)
    for high in (1, 7, 2**31 - 1):
        expected = (words * np.uint64(high)) >> np.uint64(31)
        np.testing.assert_array_equal(Draw.of(5).round(1).integers(high, 200), expected.astype(np.int64))


def test_normals_are_the_box_muller_transform_of_the_uniforms():
    u = (reference_words(400, seed=9) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    expected = np.sqrt(-2 * np.log1p(-u[:200])) * np.cos(2 * np.pi * u[200:])
    np.testing.assert_allclose(Draw.of(9).normal(200, dtype=torch.float64), expected, rtol=0, atol=1e-13)


# ---- purity


@every_sampler
def test_a_vector_of_clients_draws_as_they_would_one_by_one(sample):
    together = sample(ROOT.client(IDS), COUNTS)
    alone = [sample(ROOT.client(int(k)), int(c)) for k, c in zip(IDS, COUNTS, strict=True)]
    assert torch.equal(together, torch.stack(alone))


@every_sampler
def test_draws_under_vmap_are_those_of_the_vector(sample):
    mapped = torch.func.vmap(lambda k, c: sample(ROOT.client(k), c))(IDS, COUNTS)
    assert torch.equal(mapped, sample(ROOT.client(IDS), COUNTS))


@every_sampler
def test_a_key_may_itself_be_mapped(sample):
    keys = ROOT.client(IDS).key
    mapped = torch.func.vmap(lambda key, c: sample(Draw(key), c))(keys, COUNTS)
    assert torch.equal(mapped, sample(Draw(keys), COUNTS))


@every_sampler
def test_draws_do_not_depend_on_which_other_clients_are_there_or_their_order(sample):
    everyone = sample(ROOT.client(IDS), COUNTS)
    some = torch.tensor([3, 0, 2])
    assert torch.equal(sample(ROOT.client(IDS[some]), COUNTS[some]), everyone[some])


@every_sampler
def test_asking_twice_gives_the_same_numbers_and_other_coordinates_others(sample):
    draw = Draw.of(7).round(3).phase("test").client(IDS)
    assert torch.equal(sample(draw, COUNTS), sample(ROOT.client(IDS), COUNTS))
    for other in (
        Draw.of(8).round(3).phase("test").client(IDS),
        Draw.of(7).round(4).phase("test").client(IDS),
        Draw.of(7).round(3).phase("tesu").client(IDS),
        ROOT.client(IDS + 1),
        ROOT.client(IDS).step(0),
    ):
        assert not torch.equal(sample(other, COUNTS), sample(draw, COUNTS))


def test_torch_s_own_generator_neither_matters_nor_moves():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        before, first = torch.get_rng_state(), ROOT.normal(4)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(1)
        assert torch.equal(ROOT.normal(4), first)


def test_a_draw_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ROOT.key = torch.zeros(())


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.uint8])
def test_the_width_of_the_ids_does_not_matter(dtype):
    ids = torch.arange(6)
    assert torch.equal(ROOT.client(ids.to(dtype)).bits(4), ROOT.client(ids).bits(4))
    mapped = torch.func.vmap(lambda k: ROOT.client(k).bits(4))(ids.to(dtype))
    assert torch.equal(mapped, ROOT.client(ids).bits(4))
    assert torch.equal(ROOT.client(ids).step(ids.to(dtype)).key, ROOT.client(ids).step(ids).key)


def test_numpy_integers_are_coordinates_too():
    for kind in (np.int64, np.int32, np.uint64):
        assert torch.equal(Draw.of(kind(4)).client(kind(9)).key, Draw.of(4).client(9).key)


def test_no_two_places_of_a_large_grid_share_a_key():
    ids, steps = torch.arange(40), torch.arange(10)
    keys = [
        Draw.of(seed).round(index).phase(phase).client(ids[:, None]).step(steps).key.flatten()
        for seed, index, phase in product(range(10), range(10), ("a", "b", "batches"))
    ]
    assert len(torch.cat(keys).unique()) == 10 * 10 * 3 * 40 * 10


def test_the_order_and_kind_of_coordinates_matter():
    draw = Draw.of(1)
    places = [
        draw.round(2).client(3),
        draw.round(3).client(2),
        draw.client(3).round(2),
        draw.client(3).step(2),
        draw.round(2).step(3),
        draw.round(2).round(3),
        draw.client(2).client(3),
    ]
    assert len({int(place.key) for place in places}) == len(places)


# ---- neighbouring coordinates are unrelated

NEIGHBOURS = {
    "seed": lambda i: Draw.of(i),
    "round": lambda i: Draw.of(0).round(i),
    "client": lambda i: Draw.of(0).client(i),
    "step": lambda i: Draw.of(0).client(1).step(i),
    "round of another seed": lambda i: Draw.of(i).round(1 - i),
    "parent and child": lambda i: Draw.of(0).client(0) if i == 0 else Draw.of(0).client(0).step(0),
}


@pytest.mark.parametrize("place", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())
def test_neighbouring_draws_are_uncorrelated_at_every_lag(place):
    n = 16_000
    a, b = (place(i).normal(n, dtype=torch.float64) for i in (0, 1))
    for lag in range(4):
        assert abs(float(a[lag:] @ b[: n - lag])) < 4 * (n - lag) ** 0.5


@pytest.mark.parametrize("coordinate", ["client", "step"])
def test_first_numbers_along_a_coordinate_are_independent_uniforms(coordinate):
    u = getattr(Draw.of(3), coordinate)(torch.arange(16_001)).uniform(2, dtype=torch.float64).numpy()
    assert stats.kstest(u[:, 0], "uniform").pvalue > 1e-3
    pairs, *_ = np.histogram2d(u[:-1, 0], u[1:, 0], bins=10, range=[[0, 1], [0, 1]])
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-3
    slots, *_ = np.histogram2d(u[:, 0], u[:, 1], bins=10, range=[[0, 1], [0, 1]])
    assert stats.chisquare(slots.ravel()).pvalue > 1e-3


def test_slots_of_one_draw_are_uncorrelated():
    n = 16_000
    z = Draw.of(2).normal(n, dtype=torch.float64)
    for lag in (1, 2, 3, n // 2):
        assert abs(float(z[lag:] @ z[: n - lag])) < 4 * (n - lag) ** 0.5


@pytest.mark.parametrize("bit", [0, 1, 7, 31, 62])
def test_one_bit_of_a_coordinate_flips_half_the_bits_of_the_word(bit):
    ids = torch.arange(2000) * 3
    flipped = ROOT.client(ids).bits() ^ ROOT.client(ids ^ (1 << bit)).bits()
    share = np.unpackbits(flipped.numpy().view(np.uint8)).reshape(2000, 64).mean(0)
    assert abs(share - 0.5).max() < 4.5 * 0.5 / 2000**0.5


# ---- distributions

LARGE = 30_000  # below the size at which torch starts its threads, which is slow on busy cores


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniforms_are_uniform(dtype):
    u = ROOT.uniform(LARGE, dtype=dtype)
    assert u.dtype == dtype
    assert 0 <= float(u.min()) < 3e-4
    assert 1 - 3e-4 < float(u.max()) < 1
    assert stats.kstest(u.double(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniforms_stay_below_one_where_every_bit_is_set(dtype, monkeypatch):
    monkeypatch.setattr(Draw, "bits", lambda self, *shape: torch.full(shape, -1))
    largest = Draw.of(0).uniform(1, dtype=dtype)
    assert float(largest) == 1 - torch.finfo(dtype).eps / 2
    assert Draw.of(0).normal(1, dtype=dtype).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normals_are_normal(dtype):
    z = ROOT.normal(LARGE, dtype=dtype)
    assert z.dtype == dtype
    z = z.double().numpy()
    assert abs(z.mean()) < 4 / LARGE**0.5
    assert abs(z.var() - 1) < 4 * (2 / LARGE) ** 0.5
    assert abs(stats.skew(z)) < 4 * (6 / LARGE) ** 0.5
    assert abs(stats.kurtosis(z)) < 4 * (24 / LARGE) ** 0.5
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert 3.5 < abs(z).max() < 6


def test_sphere_has_norm_one_and_no_preferred_direction():
    n = 5000
    s = Draw.of(1).client(torch.arange(n)).sphere(3, dtype=torch.float64)
    torch.testing.assert_close(s.norm(dim=-1), torch.ones(n, dtype=torch.float64), rtol=0, atol=1e-15)
    for axis in s.T:  # on the sphere of R³ every coordinate is uniform on [−1, 1] (Archimedes)
        assert stats.kstest(axis, "uniform", args=(-1, 2)).pvalue > 1e-3
    torch.testing.assert_close(s.T @ s / n, torch.eye(3, dtype=torch.float64) / 3, rtol=0, atol=0.02)


@pytest.mark.parametrize("probability", [0.001, 0.3, 0.5, 0.9])
def test_bernoulli_is_true_with_its_probability(probability):
    hits = ROOT.bernoulli(probability, LARGE)
    assert hits.dtype == torch.bool
    assert stats.binomtest(int(hits.sum()), LARGE, probability).pvalue > 1e-3


@pytest.mark.parametrize("word", [0, -1])
def test_bernoulli_of_zero_is_never_and_of_one_always_at_the_extreme_words_too(word, monkeypatch):
    monkeypatch.setattr(Draw, "bits", lambda self, *shape: torch.full(shape, word))
    assert not ROOT.bernoulli(0.0, 1).any()
    assert ROOT.bernoulli(1.0, 1).all()


@pytest.mark.parametrize("high", [2, 7, 10, 1000])
def test_integers_are_uniform(high):
    drawn = ROOT.integers(high, LARGE)
    assert drawn.dtype == torch.int64
    assert stats.chisquare(drawn.bincount(minlength=high)).pvalue > 1e-3
    assert len(drawn.bincount()) <= high


def test_integers_below_one_are_zero_and_large_ones_reach_their_bounds():
    assert not ROOT.integers(1, 100).any()
    drawn = ROOT.integers(2**31 - 1, LARGE)
    assert 0 <= int(drawn.min()) < 2**31 * 3e-4
    assert 2**31 * (1 - 3e-4) < int(drawn.max()) < 2**31 - 1


def test_integers_keep_below_each_client_s_own_bound():
    high = torch.tensor([1, 2, 5, 30])
    drawn = ROOT.client(torch.arange(4)).integers(high, 50, 40)
    assert drawn.shape == (4, 50, 40)
    for row, bound in zip(drawn, high.tolist(), strict=True):
        frequencies = row.flatten().bincount(minlength=bound)
        assert len(frequencies) == bound
        assert bound == 1 or stats.chisquare(frequencies).pvalue > 1e-3


def test_permutations_hold_every_number_once():
    orders = ROOT.client(torch.arange(50)).permutation(33)
    assert torch.equal(orders.sort(dim=-1).values, torch.arange(33).expand(50, 33))


def test_all_six_orders_of_three_are_equally_likely():
    orders = Draw.of(4).client(torch.arange(12_000)).permutation(3).tolist()
    seen = [orders.count(list(order)) for order in permutations(range(3))]
    assert sum(seen) == 12_000
    assert stats.chisquare(seen).pvalue > 1e-3


def test_a_masked_permutation_puts_the_numbers_below_count_first():
    orders = ROOT.client(IDS).permutation(12, COUNTS)
    for order, count in zip(orders.tolist(), COUNTS.tolist(), strict=True):
        assert sorted(order[:count]) == list(range(count))
        assert order[count:] == list(range(count, 12))


def test_padding_does_not_change_the_order_of_a_client_s_own_rows():
    alone = ROOT.permutation(5)
    for capacity in (5, 6, 40):
        assert torch.equal(ROOT.permutation(capacity, 5)[:5], alone)


def test_masked_orders_of_three_among_five_are_equally_likely():
    orders = Draw.of(4).client(torch.arange(12_000)).permutation(5, 3)[:, :3].tolist()
    seen = [orders.count(list(order)) for order in permutations(range(3))]
    assert sum(seen) == 12_000
    assert stats.chisquare(seen).pvalue > 1e-3


def test_subsets_are_distinct_ascending_and_below_their_bound():
    whole = ROOT.client(IDS).subset(12, 5)
    assert whole.shape == (5, 5)
    assert (whole.diff(dim=-1) > 0).all()
    assert 0 <= int(whole.min()) < int(whole.max()) < 12
    masked = ROOT.client(IDS).subset(12, 4, COUNTS)
    assert (masked.diff(dim=-1) > 0).all()
    assert (masked < COUNTS[:, None]).all()
    assert ROOT.subset(6, 6).tolist() == list(range(6))


def test_all_subsets_are_equally_likely():
    codes = (2 ** Draw.of(6).client(torch.arange(20_000)).subset(5, 2)).sum(-1)
    seen = codes.unique(return_counts=True)[1]
    assert len(seen) == 10
    assert stats.chisquare(seen).pvalue > 1e-3


def test_batches_stay_below_count_and_reach_every_row():
    rows = ROOT.client(IDS).batches(COUNTS, 20, 30)
    assert rows.shape == (5, 30, 20)
    for own, count in zip(rows, COUNTS.tolist(), strict=True):
        assert own.unique().tolist() == list(range(count))
    assert not torch.equal(rows[0, 0], rows[0, 1])


def test_empty_shapes_give_empty_draws():
    assert ROOT.client(IDS).normal(0, 3).shape == (5, 0, 3)
    assert ROOT.client(IDS).batches(COUNTS, 4, 0).shape == (5, 0, 4)
    assert ROOT.client(torch.arange(0)).uniform(3).shape == (0, 3)


def test_keys_of_a_batch_depend_on_all_its_rows_and_on_their_order():
    draw = Draw.of(3)
    batches = [[4, 1, 7], [1, 4, 7], [7, 1, 4], [4, 1, 8], [4, 1, 7, 7]]
    keys = [key for batch in batches for key in draw.of_batch(torch.tensor(batch)).tolist()]
    assert len(set(keys)) == len(keys)
    assert torch.equal(draw.of_batch(torch.tensor(batches[0])), draw.of_batch(torch.tensor(batches[0])))
