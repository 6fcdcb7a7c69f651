"""Methods on sub-models: what is trained, merged, moved and chosen; reductions to FedAvg; the problem and bad input."""

import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from learners import federation, play
from torch import Tensor

from coterie.errors import NoClients, UsageError
from coterie.experiment.build import assemble
from coterie.experiment.config import load
from coterie.experiment.loop import run_rounds
from coterie.federation import Each, Federation, Shard, Static
from coterie.methods import (
    ds_fl,
    fed_et,
    fedavg,
    feddf,
    feddst,
    federated_dropout,
    fedrolex,
    fedsep_submodel,
    flash,
    heterofl,
    homogeneous,
    zerofl,
)
from coterie.methods.shared.works import gradient
from coterie.methods.submodels.carving import Local, Part, asked, levels_of, merged
from coterie.methods.submodels.distilling import distilled, soft_cross_entropy
from coterie.methods.submodels.fed_et import verdict
from coterie.methods.submodels.feddst import kept_by_any
from coterie.methods.submodels.fedsep_submodel import MARGIN, HyperNetwork, decoded_mask, on_budget
from coterie.methods.submodels.flash import ranking, rearranged
from coterie.methods.submodels.thinning import counts, densest, erdos_renyi_kernel, size, spread
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.catalogue.registry import problem_entry
from coterie.problems.catalogue.submodels import SubModels, submodels
from coterie.problems.tasks.entropy import MaskedEntropy, cross_entropy

WIDE = Context(0, torch.float64)
SMALL: dict[str, Any] = {"clients": 6, "rows": 10, "width": 8, "test": 60, "public": 40}
STEPS: dict[str, Any] = {"step": 0.05, "local_steps": 2}


def a_problem(context: Context = WIDE, **settings: Any) -> SubModels:
    return submodels(context, **{**SMALL, "capacities": [1.0, 0.5, 0.25], **settings})


def sizes(problem: SubModels, levels: Tensor | None = None) -> list[int]:
    """Parameters of each client's sub-model."""
    by_level = [problem.task.anatomy.parameters(share) for share in problem.task.shares]
    return [by_level[level] for level in (problem.levels if levels is None else levels).tolist()]


# ---- merging


def test_overlapping_parts_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    common = Part(torch.tensor([0, 1]), torch.tensor([[1.0, 1.0], [3.0, 5.0]]))
    own = Part(torch.tensor([[1, 2], [2, 4]]), torch.tensor([[3.0, 1.0], [2.0, 1.0]]))
    assert merged(x, [common, own]).tolist() == [3.0, 5.0, 4.5, 4.0, 6.0]
    assert merged(x, [common, own], everyone=True).tolist() == [2.0, 4.25, 3.75, 4.0, 5.25]


def test_the_order_of_clients_does_not_matter_and_what_nobody_trained_keeps_every_bit():
    draw = Draw.of(0)
    x = draw.phase("x").normal(50, dtype=torch.float64)
    index = draw.phase("places").client(torch.arange(8)).subset(40, 9)
    change = draw.phase("change").normal(8, 9, dtype=torch.float64)
    once = merged(x, [Part(index, change)])
    order = list(range(8))
    random.Random(0).shuffle(order)
    parts = [Part(index[order[:3]], change[order[:3]]), Part(index[order[3:]], change[order[3:]])]
    torch.testing.assert_close(merged(x, parts), once, rtol=1e-12, atol=1e-12)
    untouched = torch.ones(50, dtype=torch.bool).index_fill(0, index.reshape(-1), False)
    assert int(untouched.sum()) > 10
    assert torch.equal(once[untouched], x[untouched])
    assert bool((once[~untouched] != x[~untouched]).all())


@pytest.mark.parametrize(
    "method", [heterofl, federated_dropout, fedrolex, zerofl, feddst, fedsep_submodel, homogeneous]
)
def test_full_capacity_everywhere_is_fedavg(method):
    problem = a_problem(capacities=[1.0])
    settings = {**STEPS, "batch": "all"}
    ours = play(method(**settings), problem, 3).x
    torch.testing.assert_close(ours, play(fedavg(**settings), problem, 3).x, rtol=1e-9, atol=1e-10)


def test_one_client_trains_its_window_and_nothing_else():
    problem = a_problem(capacities=[0.25])
    cut, fed = problem.task.anatomy, federation(problem, count=1)
    method = fedrolex(**STEPS)
    s = method.init(problem, 6)._replace(rounds=3)
    x = method.round(fed.begin(1, Draw.of(0)), s, Draw.of(0)).x
    inside = torch.zeros(len(x), dtype=torch.bool).index_fill(0, cut.index(cut.window(0.25, 3), 0.25), True)
    assert torch.equal(x[~inside], problem.start[~inside])
    assert float((x[inside] != problem.start[inside]).double().mean()) > 0.5


def test_heterofl_by_hand():
    """Two levels: a walk in the smaller network with the first kernels, one in the whole, and means where both are."""
    problem = a_problem(capacities=[1.0, 0.5], scalers=False)
    task, cut, x = problem.task, problem.task.anatomy, problem.start
    index, n = cut.index(cut.first(0.5), 0.5), 6
    total, holders = torch.zeros_like(x), torch.zeros_like(x)
    for k, level in enumerate(problem.levels.tolist()):
        rows, places = problem.train.client(k), index if level == 1 else torch.arange(len(x))
        theta = x[places]
        for _ in range(2):
            theta = theta - 0.05 * task.at(level).full_gradient(theta, rows)
        total[places] += theta - x[places]
        holders[places] += 1
    expected = x + total / holders
    assert sorted(set(problem.levels.tolist())) == [0, 1]
    s = play(heterofl(**STEPS, batch="all"), problem, 1)
    torch.testing.assert_close(s.x, expected)
    assert n > int(holders.min()) > 0


def test_small_groups_that_fail_do_not_stop_a_round():
    problem = a_problem()
    fed = federation(problem)

    def ask(key: str, some: Federation) -> str:
        if key == "bad":
            raise NoClients("nobody")
        return key

    groups = {"bad": torch.tensor([0, 1]), "good": torch.tensor([3]), "none": torch.tensor([], dtype=torch.int64)}
    assert asked(fed, groups, ask) == ["good"]
    with pytest.raises(NoClients, match="any capacity"):
        asked(fed, {"bad": torch.tensor([0])}, ask)


# ---- traffic


@pytest.mark.parametrize("method", [heterofl, federated_dropout, fedrolex])
def test_sub_models_are_billed_and_all_capacities_are_one_round(method):
    problem = a_problem(Context(0, torch.float32))
    assert len(set(sizes(problem))) > 1
    fed = federation(problem)
    play(method(**STEPS), problem, 3, fed=fed)
    total = fed.ledger.total
    assert total.rounds == 3
    assert total.floats_up == total.floats_down == 3 * sum(sizes(problem))
    assert total.bytes_up == 4 * total.floats_up


def test_fedsep_is_sent_the_whole_model_only_to_decode():
    problem = a_problem(Context(0, torch.float32))
    d, kernels, fed = len(problem.start), problem.task.anatomy.kernels, federation(problem)
    partial = [k for k, level in enumerate(problem.levels.tolist()) if problem.task.shares[level] < 1.0]
    method = fedsep_submodel(**STEPS, decode_steps=2, refresh=2)
    s = play(method, problem, 1, fed=fed)
    first = fed.ledger.total
    assert first.rounds == 1
    assert first.floats_down == 6 * d
    assert first.floats_up == sum(sizes(problem)) + len(partial) * kernels
    assert s.decoded[partial].tolist() == [0] * len(partial)
    draw = Draw.of(1).round(1)
    masks, s = s.masks, method.round(fed.begin(2, draw), s, draw)
    assert fed.ledger.total.floats_down - first.floats_down == sum(sizes(problem))
    assert torch.equal(s.masks, masks)
    s = method.round(fed.begin(3, draw), s, draw)
    assert s.decoded[partial].tolist() == [2] * len(partial)
    assert fed.ledger.total.rounds == 3
    shares = problem.task.shares
    counted = [sum(problem.task.anatomy.counts(shares[level])) for level in problem.levels.tolist()]
    assert s.masks.sum(1).tolist() == counted


def test_soft_labels_are_all_that_ds_fl_moves():
    problem = a_problem(Context(0, torch.float32))
    fed = federation(problem)
    s = play(ds_fl(**STEPS, public_rows=30, distil_steps=2), problem, 2, fed=fed)
    assert fed.ledger.total.floats_up == 2 * 6 * 30 * 10
    assert fed.ledger.total.floats_down == 2 * 6 * (30 * 10 + 2 * 30)
    torch.testing.assert_close(s.labels.sum(1), torch.ones(30))


def test_parts_of_a_federation_are_one_round_together():
    problem = a_problem()
    fed = federation(problem)
    groups = {"a": torch.tensor([0, 4]), "nobody": torch.tensor([9]), "b": torch.tensor([2])}
    assert [(key, some.ids.tolist()) for key, some in fed.parts(groups)] == [("a", [0, 4]), ("b", [2])]
    rows = Each(torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64), ids=torch.tensor([0, 2, 4]))
    assert rows.of(torch.tensor([4, 0])).tolist() == [[3.0], [1.0]]
    before = fed.ledger.total
    answered = [some.gather(gradient, problem.start, draw=Draw.of(0), batch=2).ids for _, some in fed.parts(groups)]
    assert [ids.tolist() for ids in answered] == [[0, 4], [2]]
    assert fed.ledger.total.rounds - before.rounds == 1
    assert fed.ledger.total.floats_up == 3 * len(problem.start)


# ---- FedSep's decode


CHOICES: dict[str, dict[str, Any]] = {
    "as printed": {"choose": "relaxed", "budget": "flops", "decode_step": 0.01, "decode_steps": 10},
    "straight-through": {"choose": "straight-through", "budget": "kernels", "decode_step": 0.05, "decode_steps": 20},
    "saliency": {"choose": "saliency", "budget": "kernels", "decode_step": 0.05, "decode_steps": 1},
}


def a_trained_perceptron(share: float) -> tuple[SubModels, Tensor]:
    problem = a_problem(model="mlp", width=None, clients=2, classes=10, rows=100, capacities=[share], public=0)
    rows, theta = problem.train.client(0), problem.start
    for _ in range(60):
        theta = theta - 0.5 * problem.task.full_gradient(theta, rows)
    return problem, theta


def decoded_by(choice: str, problem: SubModels, theta: Tensor) -> Tensor:
    static = Static(level=0, width=16, decode_batch="all", decay=0.01, resource=10.0, **CHOICES[choice])
    return decoded_mask(Shard(problem.task, problem.train.client(0), None), theta, static, Draw.of(0))


def test_the_search_optimises_what_is_cut():
    """At a quarter of the units, the loss after the cut: below that of soft masks as printed, and of chance."""
    problem, theta = a_trained_perceptron(0.25)
    cut, rows = problem.task.anatomy, problem.train.client(0)

    def loss(mask: Tensor) -> float:
        return float(problem.task.full_loss(cut.gated(theta, mask), rows))

    found = {choice: loss(decoded_by(choice, problem, theta)) for choice in CHOICES}
    chance = [loss(cut.top(0.25, Draw.of(i).uniform(64))) for i in range(5)]
    assert found["straight-through"] < 0.75 * found["as printed"] < 0.75 * sum(chance) / 5
    assert found["saliency"] < 0.75 * found["as printed"]


@pytest.mark.parametrize("choice", CHOICES)
def test_decode_finds_the_kernels_that_matter(choice):
    """Half of the hidden units of a trained perceptron are cut off from its outputs: they are not chosen."""
    problem, theta = a_trained_perceptron(0.5)
    cut, rows = problem.task.anatomy, problem.train.client(0)
    dead = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:32]
    theta = torch.where(torch.isin(cut.feeder, dead) & (cut.owner == cut.kernels), 0.0, theta)
    mask = decoded_by(choice, problem, theta)
    assert int(mask.sum()) == 32
    assert int(mask[dead].sum()) <= 8  # a few of the others do nothing either
    alive, by_chance = ~torch.isin(torch.arange(64), dead), cut.top(0.5, Draw.of(1).uniform(64))
    chosen, best, chance = (float(problem.task.full_loss(cut.gated(theta, a), rows)) for a in (mask, alive, by_chance))
    assert chosen < 1.02 * best < 0.85 * chance


def test_a_step_of_the_decode_is_torchs_adamw(monkeypatch):
    """Weight decay changes φ and not its derivative: with much of it the two differ."""
    problem, theta = a_trained_perceptron(0.5)
    cut, rows, masks = problem.task.anatomy, problem.train.client(0), []
    monkeypatch.setattr(type(cut), "top", lambda self, share, score: masks.append(score) or score > 0.5)
    knobs = {"choose": "relaxed", "budget": "kernels", "decode_step": 0.1, "decode_steps": 2, "decay": 3.0}
    static = Static(level=0, width=16, decode_batch="all", resource=10.0, **knobs)
    decoded_mask(Shard(problem.task, rows, None), theta, static, Draw.of(0))
    level = on_budget(cut, float(cut.work(cut.first(0.5))) / float(cut.work(cut.first(1.0))))
    net, offset = HyperNetwork(cut.sizes, 16), math.log(level / (1 - level)) - MARGIN
    phi = net.start(theta).requires_grad_()
    rule = torch.optim.AdamW([phi], lr=0.1, weight_decay=3.0)
    for _ in range(2):
        a = net(phi, offset)
        over = (cut.work(a) / float(cut.work(cut.first(0.5)))).clamp(min=1.0).log()
        rule.zero_grad()
        (problem.task.full_loss(cut.gated(theta, a), rows) + 10.0 * over).backward()
        rule.step()
    torch.testing.assert_close(masks[-1], net(phi, offset).detach())


def test_masks_start_on_the_budget():
    cut = a_problem().task.anatomy
    whole = float(cut.work(torch.ones(cut.kernels)))
    for share in (0.5, 0.25, 0.0625):
        a = on_budget(cut, share)
        assert float(cut.work(torch.full((cut.kernels,), a, dtype=torch.float64))) == pytest.approx(share * whole)


def test_masks_follow_the_data():
    """Two clients with the same model and capacity, but other classes, choose other kernels."""
    problem = a_problem(capacities=[0.5], clients=5)
    s = play(fedsep_submodel(**STEPS), problem, 1)
    assert len({tuple(mask) for mask in s.masks.tolist()}) > 1


def test_the_printed_mean_is_over_all_active_clients():
    problem = a_problem(capacities=[0.5, 0.25])
    settings = {**STEPS, "batch": "all", "decode_batch": "all", "decode_steps": 2}
    by_holders, by_all = (play(fedsep_submodel(**settings, average=a), problem, 1) for a in ("holders", "active"))
    cut, shares = problem.task.anatomy, problem.task.shares
    held = torch.zeros_like(problem.start)
    for k, level in enumerate(problem.levels.tolist()):
        held[cut.index(by_all.masks[k], shares[level])] += 1
    torch.testing.assert_close(by_all.x - problem.start, (by_holders.x - problem.start) * held / 6)
    assert 0 < float(held.mean()) < 6


# ---- bounds


def test_the_smallest_network_is_kept_within_the_whole_one():
    problem = a_problem()
    task, cut = problem.task, problem.task.anatomy
    s = play(homogeneous(**STEPS, size="smallest"), problem, 2)
    index = cut.index(cut.first(0.25), 0.25)
    outside = torch.ones(len(s.x), dtype=torch.bool).index_fill(0, index, False)
    assert bool((s.x[outside] == 0).all())
    inputs = problem.test.all().inputs
    torch.testing.assert_close(task.model(s.x, inputs), task.at(2, scaled=False).model(s.x[index], inputs))
    start = homogeneous().init(problem, 6).x[index]
    fresh = task.at(2, scaled=False).model.unflatten(start)
    ratio = float(fresh["4.weight"].std() / task.model.unflatten(problem.start)["4.weight"].std())
    assert 1.6 < ratio < 2.4, "a quarter of the inputs: weights twice as large"


# ---- sparse weights


def test_densest_keeps_what_it_is_told():
    cut = a_problem().task.anatomy
    kept = counts(cut, 0.25)
    score = Draw.of(0).uniform(3, len(cut.owner))
    mask = densest(cut, score, kept)
    weights = [s for s in cut.segments if s.is_weight]
    for (start, stop, _), count in zip(weights, kept, strict=True):
        assert count == round(0.25 * (stop - start))
        assert mask[:, start:stop].sum(1).tolist() == [count] * 3
        worst = torch.where(mask, score, 2.0)[:, start:stop].amin(1)
        assert bool((worst >= torch.where(mask, -1.0, score)[:, start:stop].amax(1)).all())
    assert mask.sum(1).tolist() == [size(cut, kept)] * 3
    nested = densest(cut, score, counts(cut, 0.5))
    assert bool((mask <= nested).all())


def test_zerofl_moves_the_largest_weights_only():
    problem = a_problem(capacities=[0.25])
    cut = problem.task.anatomy
    fed = federation(problem, count=1)
    method = zerofl(**STEPS, extra=0.05)
    s = method.round(fed.begin(1, Draw.of(0)), method.init(problem, 6), Draw.of(0))
    told = size(cut, counts(cut, 0.3))
    assert fed.ledger.total.floats_up == 2 * told  # values and indices
    assert 0 < int((s.x != problem.start).sum()) <= told
    weights = torch.cat([torch.arange(a, b) for a, b, is_weight in cut.segments if is_weight])
    moved = (s.x != problem.start)[weights]
    assert float(s.x[weights][moved].abs().median()) > float(s.x[weights][~moved].abs().median())


def test_feddst_moves_its_masks_and_keeps_their_sizes():
    problem = a_problem(capacities=[0.5, 0.25])
    cut = problem.task.anatomy
    method = feddst(**STEPS, readjust=2, change=0.4, until=10, when="middle", density="uniform")
    states = [play(method, problem, rounds) for rounds in (0, 1, 2)]
    expected = [size(cut, counts(cut, share)) for share in (0.5, 0.25)]
    for s in states:
        assert s.masks.sum(1).tolist() == expected
        assert bool((s.masks[1] <= s.masks[0]).all())
        assert bool((s.x[~s.masks[0]] == 0).all())
    assert torch.equal(states[0].masks, states[1].masks)
    assert not torch.equal(states[1].masks, states[2].masks)
    grown = states[2].masks[0] & ~states[0].masks[0]
    assert bool((states[2].x[grown] != 0).all())


def test_flash_fixes_densities_in_its_first_round():
    problem = a_problem(capacities=[0.5, 0.125])
    cut, fed = problem.task.anatomy, federation(problem)
    s = play(flash(**STEPS, stage_epochs=2), problem, 1, fed=fed)
    tensors = sum(part.is_weight for part in cut.segments)
    assert fed.ledger.total.floats_up == 6 * tensors
    kept = [spread(cut, share, s.sensitivity) for share in (0.5, 0.125)]
    weights = [part.stop - part.start for part in cut.segments if part.is_weight]
    assert abs(sum(kept[0]) - 0.5 * sum(weights)) <= tensors
    assert abs(sum(kept[1]) - 0.125 * sum(weights)) <= tensors
    assert all(small <= large for large, small in zip(*kept, strict=True))
    largest = densest(cut, ranking(problem.start, "random"), kept[0])
    torch.testing.assert_close(s.x, problem.start * largest)
    later = play(flash(**STEPS, stage_epochs=2), problem, 3)
    assert bool((later.x[~largest] == 0).all())
    assert torch.equal(later.sensitivity, s.sensitivity)


def test_densities_by_shape_keep_the_share():
    """ERK: densities go with Σ dimensions/Π dimensions, but for tensors that are kept whole."""
    cut = a_problem(width=16).task.anatomy
    sizes = torch.tensor([s.stop - s.start for s in cut.segments if s.is_weight])
    kept = torch.tensor(spread(cut, 0.25, erdos_renyi_kernel(cut)))
    assert abs(int(kept.sum()) - 0.25 * int(sizes.sum())) <= len(sizes)
    shapes = [p.shape for name, p in cut.module.named_parameters() if len(cut.axes[name]) > 1]
    expected = torch.tensor([sum(shape) / shape.numel() for shape in shapes])
    partial = kept < sizes
    assert 1 < int(partial.sum()) < len(sizes)
    ratio = (kept / sizes / expected)[partial]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=0.02, atol=0.0)


def test_feddst_readjusts_at_the_end_and_drops_what_all_clients_drop():
    problem = a_problem(capacities=[0.25])
    method = feddst(**STEPS, readjust=1, change=0.5, until=10)
    fed, s = federation(problem, count=1), method.init(problem, 6)
    after = method.round(fed.begin(1, Draw.of(0)), s, Draw.of(0))
    dropped = s.masks[0] & ~after.masks[0]
    assert after.masks.sum() == s.masks.sum()
    assert int(dropped.sum()) > 0
    assert bool((after.x[~after.masks[0]] == 0).all())
    grown = after.masks[0] & ~s.masks[0]
    assert bool((after.x[grown] == 0).all()), "they have not been trained yet"
    parts = [Part(torch.tensor([0, 2]), torch.zeros(1, 2)), Part(torch.tensor([[2, 3]]), torch.zeros(1, 2))]
    assert kept_by_any(torch.zeros(5), parts).tolist() == [True, False, True, True, False]


def test_stage_one_of_flash_moves_entries_to_where_weights_are_large():
    parts = [10.0 * torch.arange(1.0, 101.0), torch.arange(1.0, 101.0)]
    masks = [torch.arange(100) < 50, torch.arange(100) < 50]
    new = rearranged(parts, masks, 0.2, Draw.of(0))
    counted = [int(mask.sum()) for mask in new]
    assert counted == [40 + 18, 40 + 1]  # 20 removed in all, grown as 10 : 1, rounded down
    assert bool(new[0][10:50].all())  # the smallest tenth of each went, apart from those that grew again
    full = rearranged(parts, [torch.arange(100) < 99, torch.arange(100) < 50], 0.2, Draw.of(0))
    assert int(full[0].sum()) == 100


def test_zerofl_counts_what_was_not_sent_as_no_change():
    problem = a_problem(capacities=[0.25])
    by_all, by_senders = (play(zerofl(**STEPS, average=a), problem, 1).x for a in ("active", "holders"))
    ratio = (by_all - problem.start) / (by_senders - problem.start)
    ratio = ratio[by_senders != problem.start]
    torch.testing.assert_close(6 * ratio, (6 * ratio).round(), rtol=1e-6, atol=1e-6)
    assert set((6 * ratio).round().int().tolist()) == {1, 2, 3, 4, 5, 6}


# ---- what the public code of HeteroFL and FedRolex does


def test_rows_of_the_output_layer_are_averaged_over_the_holders_of_a_class():
    problem = a_problem(capacities=[1.0], masked="zero")
    cut, holds = problem.task.anatomy, problem.task.holds
    settings = {**STEPS, "batch": "all"}
    by_all, by_holders = (play(heterofl(**settings, output=o), problem, 1).x for o in ("clients", "holders"))
    factor = torch.ones_like(problem.start)
    for c in range(10):
        assert 0 <= int(holds[:, c].sum()) < 6
        factor[cut.output == c] = 6 / max(1, int(holds[:, c].sum()))
    torch.testing.assert_close(by_holders - problem.start, factor * (by_all - problem.start))
    assert int((cut.output >= 0).sum()) == sum(p.numel() for p in list(cut.module.parameters())[-2:])


@pytest.mark.parametrize("method", [heterofl, fedrolex, partial(fedsep_submodel, choose="saliency")])
def test_where_everybody_has_all_classes_the_output_rule_changes_nothing(method):
    problem = a_problem(classes=10, rows=20)
    one, two = (play(method(**STEPS, output=o), problem, 1).x for o in ("clients", "holders"))
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize(("masked", "instead"), [("client", -torch.inf), ("zero", 0.0)])
def test_the_loss_masks_the_classes_that_the_client_lacks(masked, instead):
    problem = a_problem(masked=masked, classes=3)
    rows = problem.train.client(0)
    labels, outputs = rows.all().labels[:2], Draw.of(0).normal(2, 10, dtype=torch.float64)
    own = problem.task.own(problem.task.at(0), rows)
    expected = outputs.clone()
    expected[:, ~problem.task.holds[0]] = instead
    assert int(problem.task.holds[0].sum()) == 3
    torch.testing.assert_close(own.loss_by_row(outputs, labels), cross_entropy(expected, labels))
    assert a_problem(masked=False).task.own(problem.task, rows) is problem.task


def test_masked_by_client_or_batch_is_the_same_where_batches_are_whole():
    settings = {**STEPS, "batch": "all"}
    by_batch, by_client = (play(heterofl(**settings), a_problem(masked=m), 2).x for m in ("batch", "client"))
    torch.testing.assert_close(by_batch, by_client)


def test_capacities_are_drawn_anew_where_the_problem_is_dynamic():
    problem = a_problem(Context(0, torch.float32), dynamic=True)
    drawn = [levels_of(problem.task, problem.levels, Draw.of(1).round(t)) for t in range(3)]
    assert len({tuple(levels.tolist()) for levels in drawn}) == 3
    for method in (heterofl, fedrolex):
        fed = federation(problem)
        play(method(**STEPS), problem, 3, fed=fed)
        assert fed.ledger.total.floats_up == sum(sum(sizes(problem, levels)) for levels in drawn)
    chosen = play(fedsep_submodel(**STEPS, choose="saliency", refresh=9), problem, 3)
    counted = [sum(problem.task.anatomy.counts(problem.task.shares[level])) for level in drawn[-1].tolist()]
    small = drawn[-1] > 0  # the largest do not decode
    assert chosen.masks.sum(1)[small].tolist() == torch.tensor(counted)[small].tolist()


def test_kernels_are_rounded_up_where_asked():
    up, down = (a_problem(rounding=r, capacities=[1.0, 0.3]).task.anatomy for r in ("up", "down"))
    assert (up.sizes, up.counts(0.3)) == ((8, 16, 16, 16), (3, 5, 5, 5))
    assert down.counts(0.3) == (2, 4, 4, 4)
    assert up.counts(0.5) == down.counts(0.5)
    assert up.counts(0.01) == (1, 1, 1, 1)


def test_local_gradients_are_clipped_and_weights_decay():
    problem = a_problem(capacities=[1.0], clients=1)
    settings = {"step": 0.5, "local_steps": 1, "batch": "all"}
    g = (problem.start - play(heterofl(**settings), problem, 1).x) / 0.5
    limit = 0.5 * float(g.norm())
    clipped = problem.start - play(heterofl(**settings, clip=limit), problem, 1).x
    torch.testing.assert_close(clipped, 0.25 * g)
    torch.testing.assert_close(play(heterofl(**settings, clip=3 * limit), problem, 1).x, problem.start - 0.5 * g)
    decayed = problem.start - play(heterofl(**settings, l2=0.1), problem, 1).x
    torch.testing.assert_close(decayed, 0.5 * (g + 0.1 * problem.start))


# ---- distillation


def test_a_verdict_by_hand():
    logits = torch.tensor([[[4.0, 0.0, 0.0]], [[0.0, 2.0, 0.0]], [[0.0, 0.0, 2.0]]])
    alpha = torch.tensor([4.0, 1.0, 1.0]) / 6  # variances go with the squares
    found = verdict(logits)
    assert found.labels.tolist() == [0]
    assert found.divided.tolist() == [True]
    torch.testing.assert_close(found.others, torch.tensor([[0.0, 1.0, 1.0]]).softmax(-1))
    assert float((alpha[:, None] * logits[:, 0]).sum(0)[0]) > 1
    agreed = verdict(torch.tensor([[[1.0, 0.0]], [[3.0, 1.0]]]))
    assert agreed.divided.tolist() == [False]


def test_a_student_learns_what_it_is_told():
    problem = a_problem()
    task = problem.task
    inputs = task.public[torch.arange(32).view(1, 32).repeat(30, 1)]
    labels = (10 * torch.nn.functional.one_hot(torch.arange(32) % 10, 10).double()).softmax(-1)
    how = Local(1e-2, 30, 32, "adam")
    theta = distilled(task, problem.start, inputs, [labels] * 30, soft_cross_entropy, how)
    before, after = (float(soft_cross_entropy(task.model(x, inputs[0]), labels)) for x in (problem.start, theta))
    assert after < before - 0.5


@pytest.mark.parametrize("method", [feddf, fed_et])
def test_networks_of_a_level_are_averaged_and_stay_within_it(method):
    problem = a_problem(capacities=[1.0, 0.25])
    cut = problem.task.anatomy
    fed = federation(problem)
    s = play(method(**STEPS, distil_steps=2, distil_rows=8), problem, 2, fed=fed)
    outside = torch.ones(len(problem.start), dtype=torch.bool)
    outside[cut.index(cut.first(0.25), 0.25)] = False
    assert bool((s.models[1][outside] == 0).all())
    assert not torch.equal(s.models[1], method(**STEPS).init(problem, 6).models[1])
    assert fed.ledger.total.floats_up == 2 * sum(sizes(problem))
    assert fed.ledger.total.rounds == 2


def test_methods_that_distil_need_public_rows():
    settings = {"problem.public": 0, "problem.clients": 6, "run.method": "feddf", "run.problem": "submodels"}
    with pytest.raises(UsageError, match="feddf needs public"):
        assemble(load(sets=settings))


# ---- the problem


def test_the_problem_is_what_it_says():
    problem = a_problem(classes=3, rows=9, clients=20)
    for k in range(20):
        labels = problem.train.client(k).all().labels
        assert len(labels.unique()) == 3
        assert labels.bincount(minlength=10).max() == 3
    assert problem.offers >= {"gradient", "submodels", "public"}
    assert len(problem.task.public) == 40
    assert [size.share for size in problem.sizes] == [1.0, 0.5, 0.25]
    assert sum(size.clients for size in problem.sizes) == 20
    assert problem.sizes[0].parameters == len(problem.start)
    again, other = (a_problem(Context(seed)) for seed in (0, 1))
    assert torch.equal(again.levels, a_problem(Context(0)).levels)
    assert not torch.equal(again.train.columns[0], other.train.columns[0])
    seen = {row.numpy().tobytes() for row in problem.train.columns[0]}
    assert not seen & {row.numpy().tobytes() for row in problem.task.public}


def test_the_masked_loss_asks_about_the_classes_at_hand():
    outputs = Draw.of(0).normal(4, 5)
    labels = torch.tensor([1, 3, 3, 1])
    torch.testing.assert_close(
        MaskedEntropy()(outputs, labels), cross_entropy(outputs[:, [1, 3]], (labels == 3).long())
    )
    every = torch.tensor([0, 1, 2, 3, 4])
    torch.testing.assert_close(
        MaskedEntropy()(outputs[:1].repeat(5, 1), every), cross_entropy(outputs[:1].repeat(5, 1), every)
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("instead", [None, -math.inf, 0.0])
def test_the_slope_of_the_masked_loss_is_its_derivative(instead, weighted):
    outputs, labels = Draw.of(0).normal(4, 5, dtype=torch.float64), torch.tensor([1, 3, 3, 1])
    loss = MaskedEntropy() if instead is None else MaskedEntropy(torch.tensor([0, 1, 0, 1, 1]) > 0, instead)
    weight = torch.tensor([1.0, 0.0, 2.0, 3.0], dtype=torch.float64) if weighted else None

    def mean(z):
        return loss(z, labels).mean() if weight is None else loss(z, labels) @ weight / weight.sum()

    torch.testing.assert_close(loss.slope(outputs, labels, weight), torch.func.grad(mean)(outputs))


def test_the_derivative_by_kernels_is_that_of_the_gated_network():
    problem = a_problem()
    task, batch = problem.task, problem.train.client(0).all()
    cut, omega = task.anatomy, problem.start
    a = 0.1 + 0.8 * Draw.of(1).uniform(cut.kernels, dtype=torch.float64)
    known = torch.func.grad(lambda a: task.loss(cut.gated(omega, a), batch))(a)
    found = cut.over_kernels(omega * task.gradient(cut.gated(omega, a), batch))
    torch.testing.assert_close(found, known)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"capacities": [1.0, 0.01]}, r"capacity of 0\.01 leaves layer 0 none of its 8 kernels.*problem\.width"),
        ({"capacities": []}, "capacities is empty"),
        ({"model": "logistic", "width": None}, "no hidden layer"),
        ({"model": "lenet5"}, "lenet5 has no width"),
        ({"classes": 11}, "10 classes, not 11"),
        ({"rows": 1}, "rows = 1 is less than one row of each"),
        ({"public": 1800}, "public = 1800 leaves none"),
        ({"clients": 5000}, "cannot be dealt"),
    ],
)
def test_bad_input(settings, text):
    with pytest.raises(UsageError, match=text):
        a_problem(**settings)


@pytest.mark.parametrize("capacity", [0.0, 1.5])
def test_a_capacity_is_a_share(capacity):
    with pytest.raises(UsageError, match="capacities"):
        load(sets={"run.method": "heterofl", "run.problem": "submodels", "problem.capacities": [capacity]})


def test_methods_need_sub_models():
    assert problem_entry("submodels").make is submodels
    with pytest.raises(UsageError, match=r"heterofl needs submodels.*friends offers"):
        assemble(load(sets={"run.method": "heterofl", "run.problem": "friends"}))


@pytest.mark.slow
def test_sub_models_learn_what_the_smallest_cannot():
    """The figure, small: after some rounds the whole model beats the network that everybody can afford."""
    found = {}
    for method in ("heterofl", "homogeneous"):
        sets = {"run.method": method, "run.problem": "submodels", "run.rounds": 15, "run.record": 15, "run.threads": 1}
        sets |= {"problem.clients": 10, "problem.classes": 5, "method.step": 0.1, "federation.mode": "vmap"}
        found[method] = run_rounds(assemble(load(sets=sets)), None).summary["final"]["test_accuracy"]
    assert found["heterofl"] > found["homogeneous"] + 0.2


@pytest.mark.slow
def test_a_decode_that_optimises_what_it_cuts_learns_more():
    """Digits, five classes per client, 20 rounds of 20 clients: the search as printed, mended, and by one gradient."""
    found = {}
    printed = {"choose": "relaxed", "budget": "flops", "decode_step": 0.01, "decode_steps": 10}
    for name, more in {"printed": printed, "mended": {}, "one gradient": {"choose": "saliency"}}.items():
        sets = {"run.method": "fedsep-submodel", "run.problem": "submodels", "run.rounds": 20, "run.record": 20}
        sets |= {"run.threads": 1, "problem.classes": 5, "method.step": 0.1, "federation.mode": "sequential"}
        sets |= {f"method.{key}": value for key, value in more.items()}
        found[name] = run_rounds(assemble(load(sets=sets)), None).summary["final"]["test_accuracy"]
    assert found["mended"] > found["printed"] + 0.08
    assert found["one gradient"] > found["printed"] + 0.15
