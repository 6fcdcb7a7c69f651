"""Sub-models: what a client's training step, and FedSep's choice of kernels, cost by its share of the model.

    python -m benchmarks.submodels --model small-cnn-norm --shape 1,28,28
    python -m benchmarks.submodels --decode --width 16

A step of plain PyTorch (forward, backward, update) on one thread with random images: processor time, the best of a few.
Memory is what the backward pass keeps, with the parameters and their gradient. With --decode, the client of a round of
FedSep on digits: ten local steps in its sub-model, and the decode before them, searched and by one gradient.
"""

import argparse
from collections.abc import Callable
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from coterie.federation import Shard, Static
from coterie.methods.submodels.carving import Local, learnt
from coterie.methods.submodels.fedsep_submodel import decoded_mask
from coterie.numerics import Draw
from coterie.problems import Context
from coterie.problems.catalogue.submodels import SHARES, submodels
from coterie.problems.models import build
from coterie.problems.models.submodel import anatomy


def kept_bytes(net: nn.Module, step: Callable[[], None]) -> int:
    """Bytes that a step keeps for its backward pass, and of the parameters and their gradient."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    held = sum(size for pointer, size in kept.items() if pointer not in own)
    return held + 2 * sum(p.numel() * p.element_size() for p in net.parameters())


def cost(model: str, width: int | None, shape: tuple[int, ...], batch: int, repeats: int) -> list[str]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cut = anatomy(build(model, shape, 10, 0, width), shape)
    inputs, labels = torch.randn(batch, *shape), torch.randint(10, (batch,))
    lines = ["| share | parameters | MFLOPs an image | ms a step | MB a step |", "|---|---|---|---|---|"]
    for share in SHARES:
        net = cut.carved(share, scaled=True).train()
        rule = torch.optim.SGD(net.parameters(), lr=0.01)

        def step(net: nn.Module = net, rule: Any = rule) -> None:
            rule.zero_grad()
            nn.functional.cross_entropy(net(inputs), labels).backward()
            rule.step()

        memory, seconds = kept_bytes(net, step), []
        for _ in range(repeats):
            start = process_time()
            step()
            seconds.append(process_time() - start)
        lines.append(
            f"| {share:g} | {cut.parameters(share):,} | {cut.flops(share) / 1e6:.3f} | {1e3 * min(seconds):.2f} "
            f"| {memory / 1e6:.2f} |"
        )
    return lines


def best(call: Callable[[], Any], repeats: int) -> float:
    """Least processor time of a call, in milliseconds."""
    seconds = []
    for _ in range(repeats):
        start = process_time()
        call()
        seconds.append(process_time() - start)
    return 1e3 * min(seconds)


def decode_cost(width: int | None, batch: int, repeats: int) -> list[str]:
    torch.set_num_threads(1)
    problem = submodels(Context(0), width=width, clients=20)
    task, cut = problem.task, problem.task.anatomy
    shard = Shard(task, problem.train.client(0), None)
    local = Static(**Local(0.05, 10, batch, "sgd")._asdict())
    knobs = {"decode_step": 0.05, "decode_steps": 20, "decode_batch": batch, "decay": 0.01, "resource": 10.0}
    lines = ["| share | 10 local steps, ms | decode of 20 steps, ms | by one gradient, ms |", "|---|---|---|---|"]
    for level, share in enumerate(SHARES):
        theta, small = problem.start[cut.index(cut.first(share), share)], task.at(level)
        times = [best(lambda theta=theta, small=small: learnt(small, theta, shard, local, Draw.of(0)), repeats)]
        for choose in ("straight-through", "saliency") if share < 1.0 else ():
            static = Static(level=level, width=16, budget="kernels", choose=choose, **knobs)
            times.append(best(lambda static=static: decoded_mask(shard, problem.start, static, Draw.of(0)), repeats))
        lines.append(f"| {share:g} | " + " | ".join([*(f"{ms:.1f}" for ms in times), *["–"] * (3 - len(times))]) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.submodels", description=__doc__)
    parser.add_argument("--model", default="small-cnn-norm")
    parser.add_argument("--width", type=int)
    parser.add_argument("--shape", default="1,28,28")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--decode", action="store_true", help="FedSep's decode against local steps, on digits")
    options = parser.parse_args()
    if options.decode:
        print("\n".join(decode_cost(options.width, options.batch, options.repeats)))
        return
    shape = tuple(int(v) for v in options.shape.split(","))
    print("\n".join(cost(options.model, options.width, shape, options.batch, options.repeats)))


if __name__ == "__main__":
    main()
