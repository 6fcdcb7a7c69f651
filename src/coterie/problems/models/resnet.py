"""ResNet-18 (He et al. 2016) for small images: a 3 × 3 stem at full size and no first pooling.

Batch norm is by the statistics of the batch at hand, as in the other models.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from coterie.problems.models.layers import BatchStatisticsNorm2d


class Block(nn.Module):
    """Two 3 × 3 convolutions and a shortcut, which is a 1 × 1 convolution where the shape changes."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = _conv(channels, outputs, 3, stride), BatchStatisticsNorm2d(outputs)
        self.second, self.second_norm = _conv(outputs, outputs, 3), BatchStatisticsNorm2d(outputs)
        same = stride == 1 and channels == outputs
        self.shortcut: nn.Module = (
            nn.Identity()
            if same
            else nn.Sequential(_conv(channels, outputs, 1, stride), BatchStatisticsNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, h, w] to [n, outputs, h / stride, w / stride]."""
        y = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(y + self.shortcut(x))


class Average(nn.Module):
    """The mean of each channel."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, h, w] to [n, channels]."""
        return x.flatten(2).mean(2)


def resnet18_layers(channels: int, outputs: int, width: int) -> nn.Sequential:
    """Four stages of two blocks, with width, 2 width, 4 width and 8 width channels."""
    blocks: list[nn.Module] = []
    before = width
    for stage in range(4):
        after = width << stage
        blocks += [Block(before, after, 1 if stage == 0 else 2), Block(after, after, 1)]
        before = after
    stem = [_conv(channels, width, 3), BatchStatisticsNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, Average(), nn.Linear(before, outputs))


def _conv(channels: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, outputs, kernel, stride, padding=kernel // 2, bias=False)
