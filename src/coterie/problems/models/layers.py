"""Layers that stay cheap when `torch.func.vmap` gives every client its own parameters.

A vmapped convolution becomes one grouped convolution with a group a client, and a vmapped batch norm is taken apart
by functorch; both lose to a few batched matrix products and sums. These layers have torch's own parameters,
initialisation and values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.numerics.control import transformed
from coterie.numerics.tracing import recording


class PatchConv2d(nn.Conv2d):
    """A convolution whose stride is its kernel: patches do not overlap, so it is one matrix product."""

    def __init__(self, channels: int, outputs: int, kernel: int, padding: int = 0) -> None:
        super().__init__(channels, outputs, kernel, stride=kernel, padding=padding)
        self.side, self.border = kernel, padding

    def tiles(self, x: Tensor) -> Tensor:
        """[n, channels, h, w] as [n, channels, h', kernel, w', kernel]."""
        n, channels, height, width = x.shape
        k, p = self.side, self.border
        rows, columns = (height + 2 * p) // k, (width + 2 * p) // k
        # pad, and cut what no patch covers, in one step (a negative pad cuts)
        x = F.pad(x, (p, columns * k - width - p, p, rows * k - height - p))
        return x.reshape(n, channels, rows, k, columns, k)

    def prepare(self, x: Tensor) -> Tensor:
        """Images as [n, h', w', channels, kernel²], which `forward` takes too, without moving a number again."""
        return self.tiles(x).permute(0, 2, 4, 1, 3, 5).flatten(4).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, h, w], or what `prepare` made of it, to [n, outputs, h', w']."""
        # a copy of the weights, or two models on one batch (under vmap) would each be given a copy of the batch
        weight = self.weight.flatten(1).clone()
        if x.dim() == 5:
            n, rows, columns = x.shape[:3]
            y = weight @ x.reshape(-1, weight.shape[1]).T
        else:
            tiles = self.tiles(x)
            n, rows, columns = (tiles.shape[i] for i in (0, 2, 4))
            y = weight @ tiles.permute(1, 3, 5, 0, 2, 4).reshape(weight.shape[1], -1)
        if self.bias is not None:
            y = y + self.bias[:, None]
        # channels stay outermost in memory, where batch norm sums over contiguous rows
        return y.reshape(-1, n, rows, columns).transpose(0, 1)


def check_values(count: int) -> None:
    """Refuse batch norm of one value per channel, as torch does, whichever kernel computes it: its variance is 0.

    Args:
        count: how many values of one channel there are.
    """
    if count == 1:
        raise ValueError(
            "batch norm by the statistics of the batch at hand expected more than 1 value per channel; take more rows "
            "per batch, or images that leave more than one pixel"
        )


class BatchStatisticsNorm2d(nn.BatchNorm2d):
    """Batch norm by the statistics of the batch at hand, in training and evaluation alike."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        """Each channel at mean 0 and variance 1 over the batch, then scaled and shifted."""
        check_values(x.numel() // max(1, x.shape[1]))
        if not transformed():  # client after client torch's own is quicker; compilers need it contiguous
            last = x.is_contiguous(memory_format=torch.channels_last) and not recording()
            x = x if last else x.contiguous()
            return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)
        n, channels, height, width = x.shape
        z = x.transpose(0, 1).reshape(channels, -1)
        z = z - z.mean(1, keepdim=True)
        variance = z.square().mean(1, keepdim=True)
        z = z * (self.weight[:, None] * torch.rsqrt(variance + self.eps)) + self.bias[:, None]
        return z.reshape(channels, n, height, width).transpose(0, 1)


class Scaler(nn.Module):
    """HeteroFL's scaler: a layer with a share of its kernels puts out as much as if it had all of them."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """x times the inverse of the share."""
        return x * self.factor
