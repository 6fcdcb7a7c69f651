"""Whatever goes wrong on the way is named, counts for no more than it is, and is the same in every repetition."""

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "methods"))

from test_conformance import Case, assert_on_simplex, assert_same, built, some

from coterie.errors import NoClients, UsageError
from coterie.experiment.build import assemble, check_deployable
from coterie.experiment.config import Config, FaultsTable, load
from coterie.experiment.loop import Result, read_lines, run_rounds
from coterie.federation import Call, Federation, Memory, Screening, Static, moved_from, staged, work
from coterie.federation.stages.faults import BOAST, HUGE, KINDS, Faults
from coterie.numerics import Draw
from coterie.numerics.sparse import Sparse, top_k

N = 9
DRAW = Draw.of(5)
HARMLESS = ("restart", "duplicate", "reorder")  # every reply arrives, unaltered
ABSENT = {"crash": "crashed", "truncate": "truncated", "misshape": "misshapen", "nan": "rejected", "inf": "rejected"}

Faulted = Callable[..., Federation]


@work
def reply(shard, shared, private, static, draw):
    """A vector, a scalar, whole numbers and a truth."""
    k = shard.train.all().inputs[0, 0]
    return {"v": k + draw.normal(4, dtype=torch.float64), "k": k}, (k.long().expand(3), k > 2.0)


@work(update=moved_from())
def stroll(shard, shared, private, static, draw):
    return shared + 1.0 + shard.train.all().inputs[0, 0]


@work
def counted(shard, shared, private, static, draw):
    return private + 1.0, private + 1.0


@work
def numbered(shard, shared, private, static, draw):
    return shard.train.count


@pytest.fixture
def faulted(tiny: Callable[..., Federation]) -> Faulted:
    def make(n: int = N, *, chunk: int | None = None, screening: Screening | None = None, **faults: Any) -> Federation:
        fed = tiny(n, chunk=chunk, **({} if screening is None else {"screening": screening}))
        return replace(fed, engine=staged(fed.engine, Faults(**faults)))

    return make


def leaves(gathered: Any) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(tuple(gathered))


def assert_equal(one: Any, two: Any) -> None:
    for a, b in zip(leaves(one), leaves(two), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def told(fed: Federation) -> Counter[str]:
    return Counter(event["event"] for event in fed.book.drain())


# one fault after the other


@pytest.mark.parametrize("kind", HARMLESS)
@pytest.mark.parametrize("chance", [0.4, 1.0])
@pytest.mark.parametrize("chunk", [None, 4])
def test_what_arrives_unaltered_counts_once_and_in_its_place(tiny, faulted, kind, chance, chunk):
    fed = faulted(chunk=chunk, **{kind: chance})
    assert_equal(fed.gather(reply, draw=DRAW), tiny(N).gather(reply, draw=DRAW))
    name = {"restart": "restarted", "duplicate": "duplicate", "reorder": "reordered"}[kind]
    events = told(fed)
    assert events.keys() == {name}
    assert events[name] == N if chance == 1.0 else 0 < events[name] < N
    w = Draw.of(1).uniform(N)
    calm = tiny(N)
    calm.gather(reply, draw=DRAW)
    one, two = (some.mean(stroll, torch.zeros(3), weights=w, draw=DRAW) for some in (fed, calm))
    assert torch.equal(one, two)
    assert fed.ledger.as_dict() == calm.ledger.as_dict()


def test_replies_really_come_twice_and_out_of_turn(faulted):
    """Else the test above would prove nothing."""
    fed = faulted(duplicate=0.5, reorder=0.5)
    call = Call(reply, None, None, Static(), DRAW)
    came = [k for replies in fed.engine.execute(call, fed.ids) for k in replies.ids.tolist()]
    assert len(came) > N
    assert came != sorted(came)


@pytest.mark.parametrize("kind", ABSENT)
def test_a_reply_that_cannot_be_used_is_left_out_and_named(tiny, faulted, kind):
    fed = faulted(**{kind: 0.4})
    rows, ids = fed.gather(reply, draw=DRAW)
    events = fed.book.drain()
    gone = sorted(event["client"] for event in events if event["event"] == ABSENT[kind])
    assert 0 < len(gone) < N
    assert sorted([*ids.tolist(), *gone]) == list(range(N))
    whole = tiny(N).gather(reply, draw=DRAW)
    assert_equal([rows], [torch.utils._pytree.tree_map(lambda t: t[ids], whole.rows)])
    assert all(event["reason"] for event in events)
    fed = faulted(**{kind: 1.0})
    with pytest.raises(NoClients, match=f"no client answered {__name__}:reply"):
        fed.gather(reply, draw=DRAW)
    assert told(fed)[ABSENT[kind]] == N


def test_late_is_missing_by_a_clock_that_nobody_waits_for(faulted):
    n, limit = 400, 15.0
    fed = faulted(n, delay=1.0, seconds=10.0, deadline=limit)
    ids = fed.gather(numbered, draw=DRAW).ids
    events = fed.book.drain()
    late = [event for event in events if event["event"] == "late"]
    assert Counter(e["event"] for e in events) == {"late": n - len(ids), "delayed": len(ids)}
    share = math.exp(-limit / 10.0)
    assert abs(len(late) / n - share) < 4 * math.sqrt(share * (1 - share) / n)
    assert all("deadline is 15 s" in event["reason"] for event in late)
    assert not {event["client"] for event in late} & {*ids.tolist()}


def test_after_a_restart_a_client_remembers_what_was_before(faulted):
    fed = faulted(restart=0.5)
    memory = Memory(torch.arange(float(N)))
    said, after = fed.mean(counted, memory=memory, draw=DRAW)
    restarted = [event["client"] for event in fed.book.drain()]
    assert 0 < len(restarted) < N
    assert float(said) == torch.arange(1.0, N + 1).mean()
    expected = torch.arange(1.0, N + 1)
    expected[restarted] -= 1.0
    assert torch.equal(after.payload, expected)


def test_a_crash_leaves_memory_as_it_was(faulted):
    fed = faulted(crash=0.5)
    (_, ids), after = fed.gather(counted, memory=Memory(torch.zeros(N)), draw=DRAW)
    expected = torch.zeros(N).index_fill(0, ids, 1.0)
    assert 0 < len(ids) < N
    assert torch.equal(after.payload, expected)


def test_a_flip_is_one_bit_of_one_number(tiny, faulted):
    whole = tiny(N).gather(reply, draw=DRAW)
    other = faulted(flip=1.0).gather(reply, draw=DRAW)
    wrong = []
    for k in other.ids.tolist():
        place = other.ids.tolist().index(k)
        bits = 0
        for a, b in zip(leaves([whole.rows]), leaves([other.rows]), strict=True):
            x, y = (t.contiguous().view(torch.uint8).reshape(len(t), -1) for t in (a, b))
            bits += sum(int(v).bit_count() for v in (x[k] ^ y[place]).tolist())
        wrong.append(bits)
    assert len(wrong) > N // 2
    assert set(wrong) == {1}


def test_a_flipped_index_is_no_index():
    """An index outside of the vector is ignored; a client must not be able to stop the server with it."""
    v = torch.tensor([[0.0, 3.0, -5.0, 1.0]])
    sent = top_k(v, 2)
    assert torch.equal(sent.dense(4), torch.tensor([[0.0, 3.0, -5.0, 0.0]]))
    for place in (4, 2**30, -1, -(2**31)):
        flipped = Sparse(sent.values, sent.places.clone().index_fill(1, torch.tensor([0]), place))
        assert torch.equal(flipped.dense(4), torch.tensor([[0.0, 3.0, 0.0, 0.0]]))


def test_a_huge_update_is_rejected_or_shortened_or_believed(faulted):
    start = torch.full((3,), 100.0, dtype=torch.float64)
    rows, ids = faulted(huge=0.2).gather(stroll, start, draw=DRAW)
    ways = (rows - start)[:, 0] / (1.0 + ids)
    struck = ways > 2.0
    assert 0 < int(struck.sum()) < N
    torch.testing.assert_close(ways[struck], torch.full_like(ways[struck], HUGE))
    assert bool((ways[~struck] == 1.0).all())

    fed = faulted(huge=0.2, screening=Screening(norm=1000.0))
    assert fed.gather(stroll, start, draw=DRAW).ids.tolist() == ids[~struck].tolist()
    assert told(fed) == {"huge": int(struck.sum()), "rejected": int(struck.sum())}

    fed = faulted(huge=0.2, screening=Screening(clip=3.0))
    short, ids = fed.gather(stroll, start, draw=DRAW)
    assert len(ids) == N
    assert float((short - start).norm(dim=1).max()) < 3.0 * N * math.sqrt(3)
    assert told(fed) == {"huge": int(struck.sum()), "clipped": int(struck.sum())}


def lies_of(fed: Federation) -> list[dict[str, Any]]:
    return fed.engine.stages[0].lies(fed.engine.engine.sizes)


def test_a_false_size_counts_up_to_what_is_trusted(tiny, faulted):
    fed = faulted(40, lie=0.2)
    lies = [event["client"] for event in lies_of(fed)]
    assert 0 < len(lies) < 20
    assert fed.sizes[lies].tolist() == [2 * BOAST] * len(lies)
    assert int((fed.sizes == 2).sum()) == 40 - len(lies)
    assert fed.engine.engine.sizes.tolist() == [2] * 40
    trusting = faulted(40, lie=0.2, screening=Screening(trust=3.0))
    assert trusting.sizes.max() == 6
    assert tiny(5, screening=Screening(trust=1.0)).sizes.tolist() == [2] * 5
    assert sorted(lies) != sorted(e["client"] for e in lies_of(faulted(40, lie=0.2, seed=1)))


def test_what_asks_for_nothing_real_is_not_spoilt(faulted):
    for kind in ("nan", "inf", "huge"):
        fed = faulted(**{kind: 1.0})
        assert fed.gather(numbered, draw=DRAW).rows.tolist() == [2] * N
        assert told(fed) == {}


def test_each_fault_is_as_frequent_as_it_was_set(faulted):
    wanted = {kind: 0.01 * (i + 1) for i, kind in enumerate(KINDS)}
    n = 40_000
    struck = Counter(Faults(**wanted).strike(DRAW.client(torch.arange(n))))
    for kind, share in wanted.items():
        assert abs(struck[kind] / n - share) < 4 * math.sqrt(share / n), kind
    even = Counter(Faults(any=0.55).strike(DRAW.client(torch.arange(n))))
    assert even.keys() == {"", *KINDS}
    assert all(abs(even[kind] / n - 0.05) < 4 * math.sqrt(0.05 / n) for kind in KINDS)
    assert set(Faults().strike(DRAW.client(torch.arange(n)))) == {""}
    assert "" not in Faults(crash=0.5, flip=0.5).strike(DRAW.client(torch.arange(n)))


def test_another_phase_or_round_has_other_faults():
    ids = torch.arange(200)
    faults = Faults(any=0.5)
    draws = (DRAW.round(0), DRAW.round(1), DRAW.round(0).phase("a"))
    assert len({tuple(faults.strike(draw.phase("faults").client(ids))) for draw in draws}) == 3


# the run loop


def configured(**more: Any) -> Config:
    run = {"run.problem": "quadratic", "run.baselines": [], "run.threads": 1, "federation.mode": "vmap"}
    return load(sets={**run, **more})


def test_the_record_names_each_fault_and_the_summary_counts_them(tmp_path):
    config = configured(**{"run.rounds": 12, "faults.any": 0.5, "faults.lie": 0.5, "federation.clip": 3.0})
    result = run_rounds(assemble(config), tmp_path)
    events = read_lines(tmp_path / "events.jsonl")
    assert result.summary["events"] == dict(sorted(Counter(e["event"] for e in events).items()))
    assert {"crashed", "lied", "rejected", "duplicate", "flip"} <= result.summary["events"].keys()
    assert all({"round", "phase", "client", "event", "reason"} <= event.keys() for event in events)


def test_a_phase_in_which_all_were_spoilt_is_skipped_and_no_divergence():
    result = run_rounds(assemble(configured(**{"run.rounds": 3, "faults.nan": 1.0})), None)
    assert (result.summary["outcome"], result.summary["rounds"]) == ("failed", 3)
    assert "no round trained anything" in result.summary["message"]
    assert result.summary["events"]["skipped"] == 3
    wild = run_rounds(assemble(configured(**{"run.rounds": 500, "method.step": 1e6, "faults.nan": 0.1})), None)
    assert wild.summary["outcome"] == "diverged"


def test_faults_strike_beside_compression():
    more = {"run.rounds": 6, "faults.any": 0.4, "federation.compress": "top-k", "federation.ratio": 0.5}
    result = run_rounds(assemble(configured(**more)), None)
    assert result.summary["outcome"] == "finished"
    assert result.summary["events"]["duplicate"] > 0


def test_settings_are_checked():
    with pytest.raises(UsageError, match=r"faults.*add up to 1\.2; a client has one fault at a time"):
        configured(**{"faults.crash": 0.6, "faults.nan": 0.6})
    with pytest.raises(UsageError, match=r"faults\.crash = 1\.5"):
        configured(**{"faults.crash": 1.5})
    with pytest.raises(UsageError, match=r"unknown key in \[faults\] 'crush'; did you mean crash"):
        configured(**{"faults.crush": 0.5})
    assert "[faults]" not in configured().as_toml()
    assert "crash = 0.5" in configured(**{"faults.crash": 0.5}).as_toml()
    parts = assemble(configured(**{"faults.crash": 0.5}))
    with pytest.raises(UsageError, match=r"simulated with run\.engine = local"):
        check_deployable(parts.config.with_run(engine="flower"), parts.method, parts.problem)


# every method

HARD = {"any": 0.33, "lie": 0.2}


def under(case: Case, faults: dict[str, float], rounds: int = 4, **federation: Any) -> Config:
    return replace(case.config(rounds=rounds, **federation), faults=FaultsTable(**faults))


def assert_sound(result: Result, case: Case) -> None:
    """It finished, or ended with an outcome that says why; what it learnt is finite and on the simplex."""
    summary = result.summary
    assert summary["outcome"] == "finished" or summary["message"], case
    assert bool(torch.isfinite(result.view.model).all())
    if result.view.weights is not None:
        assert_on_simplex(result.view.weights, 1e-9)


@some
def test_every_method_bears_a_third_of_its_replies_going_wrong(case, tmp_path):
    """And an interruption in the middle of it, and another size of chunks, change no bit."""
    config, problem = under(case, HARD, clip=3.0, trust=2.0, chunk=1000), built(case.problem, "float64")
    one = run_rounds(assemble(config, None, problem), None)
    assert_sound(one, case)
    if case.method not in ("local-train", "fednest", "fednest-sgd"):  # nested ones report a series that faults let grow
        assert one.summary["outcome"] == "finished"
        assert sum(one.summary["events"].values()) > 3
    run_rounds(assemble(config.with_run(rounds=2), None, problem), tmp_path)
    two = run_rounds(assemble(config.with_federation(chunk=2), None, problem), tmp_path, resume=True)
    assert_same(one.state, two.state)
    assert one.summary.get("events") == two.summary.get("events")
    assert one.ledger.as_dict() == two.ledger.as_dict()
    events = [event for event in read_lines(tmp_path / "events.jsonl") if event["event"] != "resumed"]
    assert sorted(map(str, events)) == sorted(map(str, one.events))
