"""How fast a round is: workloads, peers that do the same arithmetic, and limits. `python -m benchmarks` runs it."""
