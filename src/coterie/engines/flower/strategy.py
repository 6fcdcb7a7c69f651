"""Learned weights for a Flower app that has a strategy already: FedAvg with weights by what helps the target.

Clients train as they do. Their replies become directions u_k = x − x_k, and the new model is x − Σ w_k u_k. FedAvg
takes w_k ∝ n_k; here w is learned on validation rows at the server, and each round starts from the weights of the last:

    meritfed            w ≈ argmin_{w∈Δ} L_0(x − Uᵀw) by mirror descent, warm-started (MeritFed with local steps)
    projected-gradient  w ← Π_Δ(w + η U∇L_0(x − Uᵀw)), one step per round
"""

import warnings
from collections.abc import Iterable
from logging import getLogger
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from coterie.errors import UsageError, clean
from coterie.federation import Screening, pack
from coterie.methods.weights.mirror import mirror_descent
from coterie.numerics import uniform
from coterie.numerics.simplex import project_simplex
from coterie.problems.models import FlatModel
from coterie.problems.tasks.supervised import RowLoss, Supervised


class LearnedWeights(FedAvg):
    """FedAvg whose weights are learned on the server's validation rows.

    The weights are in the round's metrics as `weight/NODE`, and in `history`, by round. A reply without the arrays that
    were sent is left out; `left_out` has its node and the reason, by round.

    Args:
        model: a torch module whose state_dict has the keys of the arrays.
        validation: (inputs, labels) at the server, which define the goal.
        loss: the name of a loss, or a function of (outputs, labels) that returns one number per row.
        method: "meritfed" (mirror descent) or "projected-gradient" (one projected step per round).
        mirror_step: size of a mirror step, for meritfed.
        mirror_steps: mirror steps per round, for meritfed.
        outer_step: η, the size of the projected step, for projected-gradient.
        fedavg: the arguments of Flower's FedAvg.

    Example:
        >>> strategy = LearnedWeights(model, (inputs, labels), fraction_train=0.5)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        validation: Any,
        loss: str | RowLoss = "cross_entropy",
        *,
        method: Literal["meritfed", "projected-gradient", "primal-dual"] = "meritfed",
        mirror_step: float = 0.1,
        mirror_steps: int = 10,
        outer_step: float = 0.1,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        if method == "primal-dual":
            text = 'method "primal-dual" of LearnedWeights is now called "projected-gradient", which is what it does.'
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            method = "projected-gradient"
        if method not in ("meritfed", "projected-gradient"):
            raise UsageError(f"method {method!r} is unknown; choose meritfed or projected-gradient.")
        self.method = method
        self.mirror_step, self.mirror_steps, self.outer_step = mirror_step, mirror_steps, outer_step
        self.flat = FlatModel(model)
        self.task = Supervised.of(self.flat, loss)
        self.rows = pack([validation], who="validation set").to(dtype=self.flat.start.dtype, device="cpu").client(0)
        self.weights: dict[int, float] = {}
        self.history: dict[int, dict[int, float]] = {}
        self.left_out: dict[int, dict[int, str]] = {}
        self._sent: ArrayRecord | None = None

    def configure_train(self, server_round: int, arrays: ArrayRecord, *more: Any, **named: Any) -> Iterable[Message]:
        """As FedAvg; the model that is sent is remembered."""
        self._sent = arrays
        return super().configure_train(server_round, arrays, *more, **named)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The learned combination instead of the mean; metrics are FedAvg's, and the weights."""
        arrived = list(replies)
        before = {} if self._sent is None else self._sent.to_torch_state_dict()
        received = {m.metadata.src_node_id: m for m in arrived if not m.has_error()}
        faults = {node: fault for node, m in received.items() if before and (fault := _fault(m, before))}
        for node, fault in faults.items():
            getLogger("flwr").warning("the reply of node %d is left out: %s", node, fault)
        self.left_out[server_round] = faults
        kept = [m for m in arrived if m.has_error() or m.metadata.src_node_id not in faults]
        _, metrics = super().aggregate_train(server_round, kept)
        nodes = sorted(received.keys() - faults.keys())
        if not nodes or not before:
            return None, metrics
        states = [_arrays(received[node]).to_torch_state_dict() for node in nodes]
        x = self._vector(before)
        U = torch.stack([x - self._vector(state) for state in states])
        fine, reasons = Screening().reasons(U)
        faults |= {node: reason for node, reason in zip(nodes, reasons, strict=bool(reasons)) if reason}
        if not bool(fine.any()):
            return None, metrics
        nodes = [node for node, ok in zip(nodes, fine.tolist(), strict=True) if ok]
        U = U[fine]
        w = self._learned(x, U, self._before(nodes, like=x))
        self.weights = {**self.weights, **dict(zip(nodes, w.tolist(), strict=True))}
        self.history[server_round] = dict(zip(nodes, w.tolist(), strict=True))
        metrics = MetricRecord() if metrics is None else metrics
        for node, weight in self.history[server_round].items():
            metrics[f"weight/{node}"] = weight
        return self._record(x - w @ U, before, states, w, fine), metrics

    def _learned(self, x: Tensor, U: Tensor, w: Tensor) -> Tensor:
        def slope(at: Tensor, i: int = 0) -> Tensor:
            """∂L_0(x − Uᵀw)/∂w."""
            return -U @ self.task.full_gradient(x - at @ U, self.rows)

        if self.method == "projected-gradient":
            return project_simplex(w - self.outer_step * slope(w))
        return mirror_descent(w, slope, step=self.mirror_step, steps=self.mirror_steps)

    def _before(self, nodes: list[int], like: Tensor) -> Tensor:
        """The weights of the last round among these nodes; a new node gets their mean."""
        known = [self.weights[node] for node in nodes if self.weights.get(node, 0.0) > 0.0]
        if not known:
            return uniform(len(nodes), like=like)
        mean = sum(known) / len(known)
        w = like.new_tensor([self.weights.get(node, mean) for node in nodes])
        return w / w.sum()

    def _vector(self, state: dict[str, Tensor]) -> Tensor:
        """The trained parameters of a state dict, as one vector."""
        names = self.flat.unflatten(self.flat.start)
        missing = names.keys() - state.keys()
        if missing:
            raise UsageError(f"the arrays lack {min(missing)!r}; give LearnedWeights the model that clients train.")
        return torch.cat([state[name].reshape(-1).to(self.flat.start) for name in names])

    def _record(
        self, theta: Tensor, before: dict[str, Tensor], states: list[dict[str, Tensor]], w: Tensor, fine: Tensor
    ) -> ArrayRecord:
        """The new model as arrays; what is not trained (running statistics) is averaged with the same weights."""
        new = self.flat.parameters(theta)
        kept = [state for state, ok in zip(states, fine.tolist(), strict=True) if ok]
        for name in before.keys() - new.keys():
            columns = torch.stack([state[name] for state in kept])
            whole = not columns.is_floating_point()
            new[name] = columns[0] if whole else torch.tensordot(w.to(columns), columns, 1)
        return ArrayRecord({name: new[name] for name in before})


def _arrays(message: Message) -> ArrayRecord:
    (record,) = message.content.array_records.values()
    return record


def _fault(message: Message, sent: dict[str, Tensor]) -> str:
    """Why a reply cannot be combined with the others: it must have the arrays that were sent, in their shapes."""
    records = list(message.content.array_records.values())
    if len(records) != 1:
        return f"it has {len(records)} records of arrays, not 1"
    found = {name: tuple(array.shape) for name, array in records[0].items()}
    for name, tensor in sent.items():
        if name not in found:
            return f"it lacks {name!r}"
        if found[name] != tuple(tensor.shape):
            return f"its {name!r} has shape {found[name]}, not {tuple(tensor.shape)}"
    surplus = sorted(found.keys() - sent.keys())
    if surplus:
        return f"it has {clean(surplus[0])!r}, which was not sent"
    try:
        records[0].to_torch_state_dict()
    except Exception as error:  # whatever Flower and numpy make of a client's bytes
        return f"its arrays cannot be read: {clean(str(error))}"
    return ""
