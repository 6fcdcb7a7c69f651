"""Which clients belong together, by a matrix of weights."""

from torch import Tensor

SHARE = 0.5  # of an equal share, which two clusters must give each other on average to become one


def clusters(W: Tensor, share: float = SHARE) -> list[list[int]]:
    """Clusters of the rows of W [K, K], by average linkage of (W + Wᵀ)/2: members ascending, in order of the first.

    The two clusters whose members give each other most become one, as long as that is, on average over the pairs, at
    least `share` of the 1/K that every client would give to every other. So equal weights make one cluster and W = 1
    none; neither the number of clusters nor what clients keep for themselves needs to be known.

    Args:
        W: row i has the weights that client i gives to all clients.
        share: the least mean weight within a cluster, as a share of 1/K.
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    n = len(W)
    if n < 2 or not bool(W.isfinite().all()):  # a run that diverged has no clusters
        return [[k] for k in range(n)]
    w = W.detach().cpu().double()
    given = squareform(((w + w.T) / 2.0).fill_diagonal_(0.0).numpy(), checks=False)
    top = given.max()
    labels = fcluster(linkage(top - given, "average"), top - share / n, "distance")
    members: dict[int, list[int]] = {}
    for k, label in enumerate(labels.tolist()):
        members.setdefault(label, []).append(k)
    return sorted(members.values())
