"""Sub-models: what a client's training step costs by its share of the model.

    python -m benchmarks.submodels --model small-cnn-norm --shape 1,28,28

A step of plain PyTorch (forward, backward, update) on one thread with random images: processor time, the best of a few.
Memory is what the backward pass keeps, with the parameters and their gradient.
"""

import argparse
from collections.abc import Callable
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from coterie.problems.catalogue.submodels import SHARES
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.submodels", description=__doc__)
    parser.add_argument("--model", default="small-cnn-norm")
    parser.add_argument("--width", type=int)
    parser.add_argument("--shape", default="1,28,28")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    shape = tuple(int(v) for v in options.shape.split(","))
    print("\n".join(cost(options.model, options.width, shape, options.batch, options.repeats)))


if __name__ == "__main__":
    main()
