"""W1 … W7. Each is a round as a run makes it, or a whole task (W7), beside the same by other code."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speed import flower_peer, jax_peer, limits, loops, pfl_peer, vmap_peer
from benchmarks.speed.loops import Knobs, Period
from benchmarks.speed.measure import JAX, LIMIT, LOOP, OURS, PLAIN, Reading, Side, Workload
from benchmarks.speed.scene import ROUND, SEED, active, images, ordinary, ours, problem_of
from coterie.experiment.build import make_problem
from coterie.experiment.config import load as load_config
from coterie.methods.base import Method
from coterie.methods.baselines.fedavg import fedavg
from coterie.methods.baselines.local_svrg import local_svrg
from coterie.methods.nested.fednest import fednest
from coterie.methods.weights.bilevel import bilevel
from coterie.methods.weights.meritfed import meritfed
from coterie.methods.weights.primal_dual import gradient_and_product
from coterie.numerics import Draw
from coterie.problems.catalogue.hyper_representation import HeadLoss
from coterie.problems.data.dealt import dense
from coterie.problems.nested import Nested

WITHIN = 1 / 1.3  # a limit may be so much faster
"""What is wanted of a limit: ours takes at most 1.3 times as long."""
AS_COMPILED = 1 / 1.2
"""What is wanted of JAX: ours takes at most 1.2 times as long."""
PFL, FLOWER = 2.0, 50.0
"""What is wanted of these libraries: so many times our time, at least."""


def both(quick: bool, problem: Any, method: Method, **more: Any) -> dict[str, Side]:
    """Rounds as a long run makes them by default, compiled where that was measured to pay; and as they are written.

    At the quick size nothing is compiled: it would take longer than everything else.
    """
    plain = ours(problem, method, **more)
    return {OURS: plain} if quick else {OURS: ours(problem, method, compiled=True, **more), PLAIN: plain}


def _beside_jax(workload: Workload, round: str, *arguments: Any, **settings: Any) -> Workload:
    """The workload with one more side: that round of `jax_rounds`, or why it is absent."""
    why = jax_peer.missing()
    if why is not None:
        return replace(workload, absent={**workload.absent, JAX: why})
    return replace(workload, sides={**workload.sides, JAX: jax_peer.side(round, *arguments, **settings)})


def _native_loop() -> float:
    """What is wanted of a loop over native kernels: a tie on one thread, more where clients can share two cores."""
    return 1.5 if torch.get_num_threads() == 2 else 1.0


def w1(quick: bool, refresh: bool = True) -> Workload:
    """Local-SVRG, the tiny network of paper 1, 15 clients, T = 50 steps of 50 rows, averaged every 10.

    W1n is the same without `refresh`: anchors stay where they were at the start, so that compiled steps are compared
    more than passes over all rows.
    """
    step = 0.05
    clients, rows, T, tau, batch, q = (4, 60, 6, 3, 20, 0.2) if quick else (15, 4000, 50, 10, 50, 0.02)
    name, q = ("W1", q) if refresh else ("W1n", 1e-9)  # local_svrg wants a probability above 0
    shards = images(clients, rows, (1, 28, 28))
    problem, net = problem_of("cnn", shards)
    method = local_svrg(step=step, local_steps=tau, steps=T, batch=batch, refresh=q)
    plan = _periods(clients, rows, T, tau, batch, q)
    patches, labels = problem.train.columns
    patches, labels = patches.view(clients, rows, 49, 16), labels.view(clients, rows)
    sides: dict[str, Side] = {
        **both(quick, problem, method),
        LOOP: lambda: loops.local_svrg(net, ordinary(net), problem.start, shards, plan, step),
        LIMIT: lambda: limits.local_svrg(problem.start, patches, labels, plan, step),
    }
    what = f"Local-SVRG, tiny CNN, {clients} clients of {rows} rows, {T} steps{'' if refresh else ', anchors fixed'}"
    # a ReLU that rounding switches on one side only moves so small a network by as much; the quick size has none
    tolerance = 1e-4 if quick else 1e-2
    workload = Workload(name, what, sides, {LOOP: 4.0, LIMIT: WITHIN, JAX: AS_COMPILED}, tolerance=tolerance)
    by_step = torch.stack([p.rows for p in plan]).transpose(1, 2), torch.stack([p.coins for p in plan]).transpose(1, 2)
    return _beside_jax(workload, "local_svrg", problem.start, patches, labels, *by_step, step=step)


def w1_outer(quick: bool, T: int = 40) -> Workload:
    """A bilevel outer round of paper 1, beside plain vmap. Paper: T = 400 steps; a tenth shows the ratio."""
    clients, rows, T, tau, batch, q = (4, 60, 6, 3, 20, 0.2) if quick else (15, 4000, T, 10, 50, 0.02)
    shards = images(clients, rows, (1, 28, 28))
    problem, net = problem_of("cnn", shards)
    step, system_step = 0.05, 5e-4
    method = bilevel(step=step, system_step=system_step, local_steps=tau, steps=T, batch=batch, refresh=q)
    plans = tuple(_periods(clients, rows, T, tau, batch, q, phase) for phase in ("model", "system"))

    def peer() -> Tensor:
        theta, merits = vmap_peer.outer_round(net, problem.start, shards, shards[0], plans, (step, system_step))
        return torch.cat([theta, merits])

    def read(s: Any) -> Tensor:
        return torch.cat([s.theta, s.gradient])

    sides: dict[str, Side] = {**both(quick, problem, method, what=read), "plain vmap": peer}
    what = f"bilevel outer round, tiny CNN, {clients} clients of {rows} rows, {T} steps of model and system each"
    return Workload("W1o", what, sides, {"plain vmap": 3.0}, tolerance=1e-4 if quick else 1e-2)


def _periods(clients: int, rows: int, T: int, tau: int, batch: int, q: float, phase: str = "model") -> list[Period]:
    """What Local-SVRG draws."""
    plan = []
    for first in range(0, T, tau):
        draw = ROUND.phase(phase).step(first).client(torch.arange(clients))
        steps = min(tau, T - first)
        plan.append(Period(draw.phase("batch").batches(rows, batch, steps), draw.phase("anchor").bernoulli(q, steps)))
    return plan


def w2(quick: bool) -> Workload:
    """An epoch of FedNest on the hyper-representation problem at its paper's size: 100 clients, 10 a round."""
    clients, count, rows, width, pixels = (6, 3, 20, 12, 5) if quick else (100, 10, 300, 200, 28)
    knobs = Knobs(step=0.5, outer_step=0.1, steps=5, terms=5, lipschitz=10.0, ridge=0.01)
    batch = 8 if quick else 64
    train, valid = (images(clients, rows, (1, pixels, pixels), seed) for seed in (0, 1))
    net = dense([width, 10], (1, pixels, pixels), 0)
    backbone, head = net[:-1], nn.Sequential(net[-1])
    problem = Nested(HeadLoss(knobs.ridge), HeadLoss()).on(train, valid, x=backbone, y=head)
    method = fednest(
        step=knobs.step,
        outer_step=knobs.outer_step,
        local_steps=knobs.steps,
        terms=knobs.terms,
        lipschitz=knobs.lipschitz,
        batch=batch,
    )
    ids = torch.tensor(active(problem, count=count))
    walk = ROUND.phase("inner").step(0).phase("walk").client(ids)
    index = walk.batches(rows, batch, knobs.steps - 1)
    start = torch.cat([problem.start, problem.inner_start])
    mine, goals = ([shards[k] for k in ids.tolist()] for shards in (train, valid))
    flat = [tuple(t.flatten(2) if t.dim() > 2 else t for t in limits.stacked(shards)) for shards in (mine, goals)]
    layers = [p.detach().clone() for p in net.parameters()]
    what = f"FedNest epoch, MLP {pixels * pixels}-{width}-10, {count} of {clients} clients"
    sides: dict[str, Side] = {
        **both(quick, problem, method, what=lambda s: torch.cat([s.x, s.y]), count=count),
        LOOP: lambda: loops.fednest(backbone, head, start, mine, goals, index, knobs),
        LIMIT: lambda: limits.fednest(layers, flat[0], flat[1], index, knobs),
    }
    workload = Workload("W2", what, sides, {LOOP: 1.5, LIMIT: WITHIN, JAX: AS_COMPILED})
    return _beside_jax(workload, "fednest", tuple(layers[:2]), tuple(layers[2:]), *flat, index, knobs=knobs)


def w3(quick: bool) -> Workload:
    """What the clients do in a step of the primal–dual method: LeNet-5, a gradient and a product on 64 rows each."""
    clients, rows, batch = (3, 12, 4) if quick else (10, 500, 64)
    shards = images(clients, rows, (1, 28, 28))
    problem, net = problem_of("lenet5", shards)
    v = Draw.of(7).normal(len(problem.start)) / 30.0
    draw = ROUND.client(torch.arange(clients))
    first, second = (draw.phase(name).batches(rows, batch, 1)[:, 0] for name in ("gradient", "product"))
    buffers = limits.Buffers(ordinary(net))

    sides: dict[str, Side] = {
        **both(quick, problem, _primal_dual_step(v, batch), what=lambda pair: torch.cat(pair)),
        LOOP: lambda: torch.cat(loops.gradient_and_product(net, problem.start, v, shards, first, second)),
        LIMIT: lambda: torch.cat(limits.gradient_and_product(buffers, problem.start, v, shards, first, second)),
    }
    what = f"primal–dual step, LeNet-5, {clients} clients, gradient and product on {batch} rows"
    return Workload("W3", what, sides, {LOOP: _native_loop(), LIMIT: WITHIN})


def _primal_dual_step(v: Tensor, batch: int) -> Method:
    """The clients' part of primal-dual: what the method gathers, without its few operations on the server."""

    def round(fed: Any, theta: Tensor, draw: Draw) -> Any:
        return fed.gather(gradient_and_product, (theta, v), draw=draw, batch=batch, scalar=False).rows

    return Method("primal-dual-step", lambda problem, n: problem.start, round, lambda s: s)


def w4(quick: bool) -> Workload:
    """A round of MeritFed on mean estimation as in its paper: 150 clients, 50 mirror steps."""
    mirror_steps, samples = (5, 20) if quick else (50, 1000)
    step, mirror_step = 2.0, 3.5
    sets = {"problem.samples": samples, "problem.validation": samples}
    problem = make_problem(load_config(sets=sets, flags={"run.problem": "mean-estimation"}))
    method = meritfed(step=step, mirror_step=mirror_step, mirror_steps=mirror_steps)
    rows = problem.train.columns[0].view(problem.clients, samples, -1)
    valid = problem.target.valid.all().inputs
    shards = list(rows)
    knobs = {"step": step, "mirror_step": mirror_step, "mirror_steps": mirror_steps}
    sides: dict[str, Side] = {
        **both(quick, problem, method, what=lambda s: torch.cat([s.x, s.w])),
        LOOP: lambda: loops.meritfed(problem.start, shards, valid, **knobs),
        LIMIT: lambda: limits.meritfed(problem.start, rows, valid, **knobs),
    }
    what = f"MeritFed, mean estimation, {problem.clients} clients, {mirror_steps} mirror steps"
    workload = Workload("W4", what, sides, {LOOP: 50.0, LIMIT: WITHIN, JAX: AS_COMPILED})
    return _beside_jax(workload, "meritfed", problem.start, rows, valid, **knobs)


def w5(quick: bool, pixels: int = 8, peers: bool = True) -> Workload:
    """FedAvg of logistic regression on images of so many pixels a side, 50 of 1,000 clients, 5 steps of 20 rows."""
    size = (12, 4, 10, 5, 20) if quick else (1000, 50, 100, 5, 20)
    title = f"logistic regression {pixels * pixels}-10"
    name = "W5" if pixels == 8 else "W5b"
    return _fedavg(quick, name, "logistic", title, (1, pixels, pixels), *size, loop=8.0, peers=peers)


def w5_cnn(quick: bool, peers: bool = False) -> Workload:
    """FedAvg of the small CNN, 50 of 1,000 clients, 5 steps of 20 rows."""
    size = (5, 2, 6, 2, 4) if quick else (1000, 50, 100, 5, 20)
    shape = (1, 8, 8) if quick else (1, 28, 28)
    return _fedavg(quick, "W5c", "small-cnn", "small CNN", shape, *size, loop=_native_loop(), peers=peers)


def w6(quick: bool) -> Workload:
    """FedAvg of ResNet-18, 10 clients, one step of 8 rows."""
    size = (3, 3, 6, 1, 4) if quick else (10, 10, 20, 1, 8)
    width, shape = (2, (3, 16, 16)) if quick else (None, (3, 32, 32))
    return _fedavg(quick, "W6", "resnet18", "ResNet-18", shape, *size, loop=_native_loop(), width=width)


def _fedavg(
    quick: bool,
    name: str,
    model: str,
    title: str,
    shape: tuple[int, ...],
    clients: int,
    count: int,
    rows: int,
    steps: int,
    batch: int,
    *,
    loop: float,
    peers: bool = False,
    width: int | None = None,
) -> Workload:
    step = 0.05
    shards = images(clients, rows, shape)
    problem, net = problem_of(model, shards, width)
    method = fedavg(step=step, local_steps=steps, batch=batch)
    ids = active(problem, count=count)
    index = ROUND.phase("walk").client(torch.tensor(ids)).batches(rows, batch, steps)
    plan = dict(zip(ids, index, strict=True))
    sides: dict[str, Side] = {
        **both(quick, problem, method, count=count),
        LOOP: lambda: loops.fedavg(net, problem.start, shards, plan, step),
    }
    if model == "logistic":
        x, y = limits.stacked(shards)
        x, chosen = x.flatten(2), torch.tensor(ids)
        sides[LIMIT] = lambda: limits.logistic_fedavg(problem.start, x, y, chosen, index, step)
        share = None
    else:
        buffers = limits.Buffers(ordinary(net))
        sides[LIMIT] = lambda: limits.fedavg(buffers, problem.start, shards, plan, step)
        share = (lambda: limits.fedavg(buffers, problem.start, shards, {ids[0]: index[0, :1]}, step), count * steps)
    what = f"FedAvg, {title}, {count} of {clients} clients, {steps} steps of {batch} rows"
    wanted, absent, once = {LOOP: loop, LIMIT: WITHIN, JAX: AS_COMPILED}, {}, {}
    if peers:
        wanted |= {"pfl": PFL, "flower": FLOWER}
        absent = {name: why for name, why in (("pfl", pfl_peer.missing()), ("flower", flower_peer.missing())) if why}
        if "pfl" not in absent:
            sides["pfl"] = pfl_peer.side(ordinary(net), problem.start, shards, plan, step)
        if "flower" not in absent:
            rounds = [(problem.start, plan)] * flower_peer.ROUNDS
            once["flower"] = lambda: flower_peer.reading(model, shape, shards, rounds, step)
    workload = Workload(name, what, sides, wanted, absent, once, share)
    if model != "logistic":
        return workload
    return _beside_jax(workload, "logistic_fedavg", problem.start, x, y, chosen, index, step=step)


def w7(quick: bool) -> Workload:
    """FLUTE's task LR-MNIST as a whole: 100 FedAvg rounds of logistic regression 784-10, 10 of 1,000 clients each.

    From FLUTE's repository (microsoft/msrflute: README, experiments/cv_lr_mnist): clients, clients per round, rounds,
    batches of 10, one local epoch, SGD with step 0.03. It prints 30:14 minutes for Flower 1.0 and 3:20 for FLUTE, on
    the wall of a processor that it does not name, with a test every 20 rounds.

    Assumed: 60 rows per client (MNIST's 60,000 in equal parts; FLUTE takes FedML's unequal parts), so that an epoch is
    6 steps, of rows drawn with replacement. Rows are noise. There is no test, no weight decay (FedML's settings there
    have 0.001), and no sigmoid before the softmax, as FLUTE's model has.

    Flower makes the last rounds only, from coterie's models before them; the time of one is multiplied by their number.
    """
    clients, count, rows, rounds, pixels = (12, 3, 20, 4, 5) if quick else (1000, 10, 60, 100, 28)
    batch, step, shape = 10, 0.03, (1, pixels, pixels)
    steps = rows // batch
    shards = images(clients, rows, shape)
    problem, net = problem_of("logistic", shards)
    method = fedavg(step=step, local_steps=steps, batch=batch)
    ids = [torch.tensor(active(problem, t, count=count)) for t in range(rounds)]
    index = [SEED.round(t).phase("walk").client(ids[t]).batches(rows, batch, steps) for t in range(rounds)]
    plans = [dict(zip(some.tolist(), batches, strict=True)) for some, batches in zip(ids, index, strict=True)]
    x, y = limits.stacked(shards)
    x = x.flatten(2)

    def loop() -> Tensor:
        theta = problem.start
        for plan in plans:
            theta = loops.fedavg(net, theta, shards, plan, step)
        return theta

    def limit() -> Tensor:
        theta = problem.start
        for some, batches in zip(ids, index, strict=True):
            theta = limits.logistic_fedavg(theta, x, y, some, batches, step)
        return theta

    def flower() -> Reading:
        last = range(rounds - flower_peer.ROUNDS, rounds)
        starts = [ours(problem, method, rounds=t, count=count)() for t in last]
        one = flower_peer.reading("logistic", shape, shards, [(starts[t - rounds], plans[t]) for t in last], step)
        return Reading(one.result, rounds * one.cpu, rounds * one.wall)

    sides: dict[str, Side] = {**both(quick, problem, method, rounds=rounds, count=count), LOOP: loop, LIMIT: limit}
    why = flower_peer.missing()
    workload = Workload(
        "W7",
        f"FLUTE's LR-MNIST, {rounds} rounds of {count} of {clients} clients, {steps} steps of {batch} rows",
        sides,
        {LOOP: 1.0, LIMIT: WITHIN, "flower": FLOWER},
        absent={} if why is None else {"flower": why},
        once={"flower": flower} if why is None else {},
    )
    return _beside_jax(workload, "logistic_task", problem.start, x, y, torch.stack(ids), torch.stack(index), step=step)
