"""Learned weights for a Flower app that has a strategy already: FedAvg with weights by what helps the target.

Clients train as they do; their replies become directions u_k = x − x_k, and the new model x − Σ w_k u_k. Where FedAvg
takes w_k ∝ n_k, here w is learned on validation rows that the server holds, from round to round:

    meritfed     w ≈ argmin_{w∈Δ} L_0(x − Uᵀw) by mirror descent, warm-started (MeritFed with local walks)
    primal-dual  w ← Π_Δ(w − η Uλ), one step a round. Clients that only train answer no Hessian products, so
                 λ = −∇L_0(x − Uᵀw) stands where the method has −H⁻¹∇L_0.
"""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from coterie.errors import UsageError
from coterie.federation import pack
from coterie.methods.mirror import mirror_descent
from coterie.numerics import uniform
from coterie.numerics.simplex import project_simplex
from coterie.problems.models import FlatModel
from coterie.problems.task import RowLoss, Supervised


class LearnedWeights(FedAvg):
    """FedAvg whose weights are learned on the server's validation rows.

    model (a torch module whose state_dict has the keys of the arrays), validation (inputs, labels) and loss are what
    the weights are learned with; everything else is FedAvg's. The weights are in the round's metrics as
    `weight/NODE`, and in `history`, by round.
    """

    def __init__(
        self,
        model: nn.Module,
        validation: Any,
        loss: str | RowLoss = "cross_entropy",
        *,
        method: Literal["meritfed", "primal-dual"] = "meritfed",
        mirror_step: float = 0.1,
        mirror_steps: int = 10,
        outer_step: float = 0.1,
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        if method not in ("meritfed", "primal-dual"):
            raise UsageError(f"method {method!r} is none of meritfed, primal-dual.")
        self.method, self.mirror_step, self.mirror_steps, self.outer_step = (
            method,
            mirror_step,
            mirror_steps,
            outer_step,
        )
        self.flat = FlatModel(model)
        self.task = Supervised.of(self.flat, loss)
        self.rows = pack([validation], who="validation set").to(dtype=self.flat.start.dtype, device="cpu").client(0)
        self.weights: dict[int, float] = {}
        self.history: dict[int, dict[int, float]] = {}
        self._sent: ArrayRecord | None = None

    def configure_train(self, server_round: int, arrays: ArrayRecord, *more: Any, **named: Any) -> Iterable[Message]:
        """As FedAvg; the model that is sent is remembered."""
        self._sent = arrays
        return super().configure_train(server_round, arrays, *more, **named)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The learned combination instead of the mean; metrics are FedAvg's, and the weights."""
        kept = list(replies)
        _, metrics = super().aggregate_train(server_round, kept)
        good = sorted((m for m in kept if not m.has_error()), key=lambda m: m.metadata.src_node_id)
        if not good or self._sent is None:
            return None, metrics
        nodes = [m.metadata.src_node_id for m in good]
        states = [self._arrays(m).to_torch_state_dict() for m in good]
        before = self._sent.to_torch_state_dict()
        x = self._vector(before)
        U = torch.stack([x - self._vector(state) for state in states])
        fine = torch.isfinite(U).all(1)
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

        if self.method == "primal-dual":
            return project_simplex(w - self.outer_step * slope(w))
        return mirror_descent(w, slope, step=self.mirror_step, steps=self.mirror_steps)

    def _before(self, nodes: list[int], like: Tensor) -> Tensor:
        """The weights of the last round among these nodes; who is new gets their mean."""
        known = [self.weights[node] for node in nodes if self.weights.get(node, 0.0) > 0.0]
        if not known:
            return uniform(len(nodes), like=like)
        usual = sum(known) / len(known)
        w = like.new_tensor([self.weights.get(node, usual) for node in nodes])
        return w / w.sum()

    def _arrays(self, message: Message) -> ArrayRecord:
        (record,) = message.content.array_records.values()
        return record

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
        new = dict(self.flat.state_dict(theta))
        kept = [state for state, ok in zip(states, fine.tolist(), strict=True) if ok]
        for name in before.keys() - new.keys():
            columns = torch.stack([state[name] for state in kept])
            whole = not columns.is_floating_point()
            new[name] = columns[0] if whole else torch.tensordot(w.to(columns), columns, 1)
        return ArrayRecord({name: new[name] for name in before})
