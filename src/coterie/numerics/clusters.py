"""Who belongs together, by a matrix of weights."""

import torch
from torch import Tensor

SHARE = 0.5  # of an equal share, which two clusters must give each other on average to become one


def clusters(W: Tensor, share: float = SHARE) -> list[list[int]]:
    """Clusters of the rows of W [K, K], by average linkage of (W + Wᵀ)/2: members ascending, in order of the first.

    The two clusters whose members give each other most become one, as long as that is, on average over the pairs, at
    least `share` of the 1/K that everybody would give to everybody. So equal weights make one cluster and W = 1 none;
    neither the number of clusters nor what clients keep for themselves needs to be known. O(K³).
    """
    n = len(W)
    w = W.detach().cpu().double()
    given = w + w.T  # summed over pairs, between clusters
    sizes = torch.ones(n, dtype=torch.float64)
    members = [[k] for k in range(n)]
    while len(members) > 1:
        mean = (given / (2.0 * sizes[:, None] * sizes)).fill_diagonal_(-1.0)
        best = int(mean.argmax())
        a, b = sorted(divmod(best, len(members)))
        if float(mean.flatten()[best]) < share / n:
            break
        given[a] += given[b]
        given[:, a] += given[:, b]
        sizes[a] += sizes[b]
        rest = torch.arange(len(members)) != b
        given, sizes = given[rest][:, rest], sizes[rest]
        members[a] += members.pop(b)
    return sorted(sorted(cluster) for cluster in members)
