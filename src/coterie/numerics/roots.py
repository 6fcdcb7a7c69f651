"""Square roots that every processor rounds alike."""

from torch import Tensor


def square_root(x: Tensor) -> Tensor:
    """√x, at most one rounding from the nearest number.

    torch leaves `sqrt` of many numbers to MKL, which starts from the processor's approximation of 1/√x. Intel and AMD
    approximate differently, so that some roots differ in the last bit, and with them all normal draws. `rsqrt` and
    `reciprocal` divide and take roots by instructions whose rounding is fixed. The derivative overflows where x is near
    0; where lengths are differentiated, `norm` takes its roots one by one and has a derivative of 0 there.

    Args:
        x: numbers of any shape, none of them negative.

    Example:
        >>> import torch
        >>> square_root(torch.tensor([0.0, 4.0]))
        tensor([0., 2.])
    """
    return x.rsqrt().reciprocal()
