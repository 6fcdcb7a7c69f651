"""FedSep on sub-models (Li and Huang 2023, section 4.2): each client trains the kernels that suit its data.

    decode   a = argmin_a L(top_p(a) ⊙ ω) + β log(max(T(a), B)/B)   on the client's rows: AdamW on φ, a = HN(φ)
             then θ = ω[index], the largest p of each layer
    learn    Δθ on the client's rows, in the sub-model alone
    encode   Enc ≈ −Diag(a): Δθ goes back to where θ came from

T are multiply-adds, B those of a sub-model with the share p of all kernels. The loss is that of the network that is
cut: top_p(a) sets the largest p of each layer to 1 and the others to .01 (at 0 a ReLU would hide their derivatives),
and the derivative goes straight through it to a (`choose = "straight-through"`). The paper's text has soft masks in the
loss and B = pT, which is the work of √p of the kernels (`choose = "relaxed"`, `budget = "flops"`): the search then
optimises another network than it cuts.

HN is a small network: an embedding of each group of kernels, through a hidden layer common to all groups, gives the
logits of its kernels. It starts with all a alike and T(a) just below the budget, so that the data decide from the first
step on. A client decodes again when its mask is `refresh` rounds old, or its capacity is another; for that it receives
the whole ω, otherwise its sub-model only. A client that can train everything does not decode.

The decode runs the whole network at the client, whatever its capacity, as in the paper, which does not state it:
`decode_steps` gradients of the whole network, where learning takes `local_steps` of the sub-model. Two settings lower
that: a larger `refresh`, and `choose = "saliency"`, which takes one gradient, −∂L/∂a at the start, as the score.

Remark 3 prints the mean over all active clients and calls it the rule of the literature, which is the mean over the
clients that trained a parameter: `average` offers both, the second is the default. φ starts anew at every decode (to
keep it was no better). Masks are by kernel and searched on the rows that train, as in the paper's experiments; the
second term of eq. 8, through the mask's derivative, is left out, as there.
"""

from math import log, sqrt
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from coterie.federation import RESULT, Batch, Shard, Static, Tree, work
from coterie.methods.base import Draw, Federation, Method, View, validated
from coterie.methods.shared.optimisers import Rule, UpdateRule
from coterie.methods.shared.works import batches, draw_batch, own_rows
from coterie.methods.submodels.carving import (
    NEEDS,
    Local,
    Output,
    Part,
    answered,
    asked,
    known_classes,
    learn,
    learnt,
    levels_of,
    merged,
    sent,
)
from coterie.numerics.derivatives import grad
from coterie.problems.catalogue.submodels import SubModels
from coterie.problems.models.submodel import Anatomy
from coterie.settings import BatchSize, Count, NonNegative, Positive

Choice = Literal["straight-through", "relaxed", "saliency"]
LARGEST = 0.99  # a mask of 1 has no finite logit
LEAK = 0.01  # gate of kernels that are cut, while searching: at 0 a ReLU behind them would hide their derivatives
MARGIN = 0.05  # masks start this much below the budget: above it, the resource loss would outweigh the data


class FedSepSubmodelState(NamedTuple):
    """ω, the clients' levels when they last trained, their masks [n, K], the rounds of their decodes, rounds done."""

    x: Tensor
    levels: Tensor
    masks: Tensor
    decoded: Tensor
    rounds: int


class Reply(NamedTuple):
    """The changes of clients of one capacity, their ids, and their masks if these are new."""

    part: Part
    ids: Tensor
    masks: Tensor | None


class HyperNetwork(NamedTuple):
    """a = HN(φ): sizes of the groups of kernels, and how wide the embeddings and the hidden layer are."""

    sizes: tuple[int, ...]
    width: int

    @property
    def lengths(self) -> list[int]:
        """Of the parts of φ: embeddings, hidden layer, what makes logits of it, biases."""
        groups, kernels, h = len(self.sizes), sum(self.sizes), self.width
        return [groups * h, h * h, kernels * h, kernels]

    def start(self, like: Tensor) -> Tensor:
        """φ that gives all kernels nearly the same logit, 0; the same at all clients."""
        scales = (1.0, sqrt(2 / self.width), 0.1 / sqrt(self.width), 0.0)
        draw = Draw.of(0, device=like.device).phase("hyper-network")
        parts = [
            scale * draw.step(i).normal(length, dtype=like.dtype)
            for i, (scale, length) in enumerate(zip(scales, self.lengths, strict=True))
        ]
        return torch.cat(parts)

    def __call__(self, phi: Tensor, offset: float) -> Tensor:
        """The mask, [K]."""
        embedding, hidden, out, bias = torch.split(phi, self.lengths)
        h = torch.relu(embedding.view(-1, self.width) @ hidden.view(self.width, self.width))
        group = torch.repeat_interleave(
            torch.arange(len(self.sizes), device=phi.device), torch.tensor(self.sizes, device=phi.device)
        )
        return torch.sigmoid(offset + bias + (out.view(-1, self.width) * h[group]).sum(1))


def on_budget(cut: Anatomy, share: float) -> float:
    """The a that all kernels have in common where T(a) is this share of the whole; T is a quadratic function of it."""
    none, half, whole = (float(cut.work(torch.full((cut.kernels,), a, dtype=torch.float64))) for a in (0.0, 0.5, 1.0))
    square = 2 * (none + whole - 2 * half)
    linear, wanted = whole - none - square, max(0.0, share * whole - none)
    root = sqrt(linear**2 + 4 * square * wanted)
    return min(max(2 * wanted / (linear + root), 1 - LARGEST), LARGEST)


def decoded_mask(shard: Shard, omega: Tensor, static: Static, draw: Draw) -> Tensor:
    """The kernels [K] bool that keep the client's loss small within its capacity."""
    rows, cut = own_rows(shard), shard.task.anatomy
    task, share = shard.task.own(shard.task, rows), shard.task.shares[static.level]
    whole = float(cut.work(cut.first(1.0)))
    budget = share * whole if static.budget == "flops" else float(cut.work(cut.first(share)))
    level = on_budget(cut, budget / whole)
    offset = log(level / (1 - level)) - MARGIN

    def by_kernel(a: Tensor, batch: Batch) -> Tensor:  # ∂L(a ⊙ ω)/∂a
        return cut.over_kernels(omega * task.gradient(cut.gated(omega, a), batch))

    if static.choose == "saliency":
        start = omega.new_full((cut.kernels,), level)
        return cut.top(share, -by_kernel(start, draw_batch(rows, static.decode_batch, draw)))

    net, rule = HyperNetwork(cut.sizes, static.width), UpdateRule("adam", static.decode_step)

    def objective(phi: Tensor, slope: Tensor) -> Tensor:  # its derivative by φ is that of L and the resource loss
        a = net(phi, offset)
        return slope @ a + static.resource * (cut.work(a) / budget).clamp(min=1.0).log()

    phi = net.start(omega)
    moments = rule.start(phi)
    for t, batch in enumerate(batches(rows, static.decode_batch, static.decode_steps, draw), 1):
        a = net(phi, offset)
        used = a if static.choose == "relaxed" else cut.top(share, a).to(a).clamp(min=LEAK)
        slope = grad(objective)(phi, by_kernel(used, batch))
        phi, moments = rule.move(phi * (1 - static.decode_step * static.decay), slope, moments, t)
    return cut.top(share, net(phi, offset))


@work("fedsep-submodel/decode-and-learn", update=(RESULT, None))
def decode_and_learn(shard: Shard, shared: Tree, private: Tree, static: Static, draw: Draw) -> Tree:
    """Δθ of the sub-model that the client chose from ω, and its mask."""
    cut, share = shard.task.anatomy, shard.task.shares[static.level]
    mask = decoded_mask(shard, shared, static, draw.phase("decode"))
    theta = shared[cut.index(mask, share)]
    return learnt(shard.task.at(static.level, scaled=static.scaled), theta, shard, static, draw), mask


@validated
def fedsep_submodel(
    *,
    step: Positive = 0.05,
    local_steps: Count = 10,
    batch: BatchSize = 20,
    optimiser: Rule = "sgd",
    server_step: Positive = 1.0,
    average: Literal["holders", "active"] = "holders",
    output: Output = "clients",
    clip: Positive | None = None,
    l2: NonNegative = 0.0,
    refresh: Count = 2,
    choose: Choice = "straight-through",
    budget: Literal["kernels", "flops"] = "kernels",
    decode_step: Positive = 0.05,
    decode_steps: Count = 20,
    decode_batch: BatchSize = 20,
    decay: NonNegative = 0.01,
    resource: NonNegative = 10.0,
    width: Count = 16,
    scaled: bool = True,
) -> Method:
    """Let every client choose and train the kernels that suit its data within its capacity.

    Symbols: γ = step, η_g = server_step, β = resource, I_dec = decode_steps.

    Cost: 1 round per call of round; a client receives and sends its sub-model (all of the model down when it decodes).

    Args:
        optimiser: rule of the clients' local steps
        average: mean of a change over the clients that trained the parameter, or over all active ones
        output: rows of the output layer are averaged over all clients that trained them, or over those with the class
        clip: largest norm of a local gradient; no limit if not set
        l2: weight decay of the local steps
        refresh: rounds after which a client decodes its mask anew
        choose: kernels by the loss of the network that is cut (straight-through), by that of soft masks (relaxed), or
            by one gradient (saliency)
        budget: B, the work of the client's share of the kernels, or its share of the whole work
        decode_step: step size of AdamW on the hyper-network
        decode_steps: I_dec, steps of AdamW per decode
        decode_batch: rows per step of AdamW
        decay: weight decay of AdamW
        resource: β, weight of the penalty on masks above the client's budget
        width: width of the hyper-network's embeddings and hidden layer
        scaled: let sub-models scale their activations as in HeteroFL, where the problem has scalers

    Example:
        >>> from coterie.methods import fedsep_submodel
        >>> fedsep_submodel().name
        'fedsep-submodel'
    """
    local = Local(step, local_steps, batch, optimiser, clip, l2)
    decoding: dict[str, Any] = {"decode_step": decode_step, "decode_steps": decode_steps, "decode_batch": decode_batch}
    decoding |= {"decay": decay, "resource": resource, "width": width, "choose": choose, "budget": budget}

    def init(problem: SubModels, n: int) -> FedSepSubmodelState:
        cut = problem.task.anatomy
        everything = torch.ones(n, cut.kernels, dtype=torch.bool, device=problem.levels.device)
        never = torch.full_like(problem.levels, -refresh)
        return FedSepSubmodelState(problem.start, problem.levels, everything, never, 0)

    def round(fed: Federation, s: FedSepSubmodelState, draw: Draw) -> FedSepSubmodelState:
        task, cut, at = fed.task, fed.task.anatomy, draw.phase("learn")
        levels = levels_of(task, s.levels, draw)
        due = (s.rounds - s.decoded >= refresh) | (levels != s.levels)
        groups = {
            (level, new): ((levels == level) & (due == new if share < 1.0 else not new)).nonzero()[:, 0]
            for level, share in enumerate(task.shares)
            for new in (False, True)
        }

        def part(index: Tensor, change: Tensor, ids: Tensor) -> Part:
            return Part(index, change, known_classes(task, index, ids) if output == "holders" else None)

        def ask(key: tuple[int, bool], group: Federation) -> Reply:
            level, new = key
            share = task.shares[level]
            settings: dict[str, Any] = {**local._asdict(), "level": level, "scaled": scaled}
            if new:
                (change, masks), ids = group.gather(decode_and_learn, s.x, draw=at, **settings, **decoding)
                return Reply(part(cut.index(masks, share), change, ids), ids, masks)
            index = cut.index(s.masks[group.ids] if share < 1.0 else cut.first(share), share)
            change, ids = group.gather(learn, sent(s.x, index, group.ids), draw=at, **settings)
            return Reply(part(answered(index, group.ids, ids), change, ids), ids, None)

        replies = asked(fed, groups, ask)
        masks, decoded, trained_at = s.masks, s.decoded, s.levels
        for _, ids, new in replies:
            trained_at = trained_at.index_copy(0, ids, levels[ids])
            if new is not None:
                masks, decoded = masks.index_copy(0, ids, new), decoded.index_fill(0, ids, s.rounds)
        x = merged(s.x, [reply.part for reply in replies], everyone=average == "active")
        return FedSepSubmodelState(s.x + server_step * (x - s.x), trained_at, masks, decoded, s.rounds + 1)

    masks = ("fedsep-submodel/decode-and-learn",)
    return Method("fedsep-submodel", init, round, lambda s: View(s.x), needs=NEEDS, whole_numbers=masks)
