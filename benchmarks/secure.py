"""What secure sums cost: bytes per client and processor time of a client and of the server, against a plain mean.

    python -m benchmarks.secure [--clients 3 10 50] [--numbers 1000 10000 100000 1000000] [--budget 60]

One sum of random numbers per line, all clients in this process; every client's time is measured by itself, and the
median is shown. A sum that would take longer than the budget, by the line before, is left out and named.
"""

import argparse
import statistics
from collections import defaultdict
from time import process_time
from typing import Any

import numpy as np

from coterie.federation.secure import Secure
from coterie.federation.secure.encoding import encoded
from coterie.federation.secure.party import Party
from coterie.federation.secure.summing import Summation, Task, answer, size_of


def measured(clients: int, numbers: int, secure: Secure) -> dict[str, Any]:
    """One sum: bytes up and down per client, seconds of a client and of the server, and the largest error."""
    values = np.random.default_rng(0).normal(size=(clients, numbers))
    task = Task("benchmark", 1, 1, dict.fromkeys(range(clients), 1.0))
    parties = {k: Party(k, task.run, task.phase, secure) for k in range(clients)}
    spent: dict[int, float] = defaultdict(float)
    moved = {"up": 0, "down": 0}

    def ask(stage: str, messages: dict[int, Any]) -> dict[int, Any]:
        answers = {}
        for k, message in messages.items():
            begun = process_time()
            words = encoded(values[k], secure, clients) if stage == "masked" else np.zeros(0, dtype=np.uint64)
            answers[k] = answer(parties[k], stage, message, task, words)
            spent[k] += process_time() - begun
        moved["down"] += sum(map(size_of, messages.values()))
        moved["up"] += sum(map(size_of, answers.values()))
        return answers

    begun = process_time()
    total = Summation(ask, secure, task).run()
    whole = process_time() - begun
    begun = process_time()
    plain = values.astype(np.float32).sum(0)
    of_plain = process_time() - begun
    assert len(plain) == numbers
    return {
        "up": moved["up"] / clients,
        "down": moved["down"] / clients,
        "client": statistics.median(spent.values()),
        "server": whole - sum(spent.values()),
        "plain": of_plain,
        "whole": whole,
        "error": float(np.abs(total.numbers - values.sum(0)).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[3, 10, 50])
    parser.add_argument("--numbers", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of processor time per sum")
    given = parser.parse_args()
    print(
        "| clients | numbers | bytes up, plain | secure | bytes down beside the model | client, s | server, s | error |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for clients in given.clients:
        last, before = 0.0, 0
        for numbers in given.numbers:
            if before and last * numbers / before > given.budget:
                print(f"| {clients} | {numbers} | left out: above {given.budget:g} s ||||||")
                continue
            found = measured(clients, numbers, Secure())
            last, before = found["whole"], numbers
            cells = (clients, numbers, 4 * numbers, f"{found['up']:.0f}", f"{found['down']:.0f}")
            times = (f"{found['client']:.4f}", f"{found['server']:.4f}", f"{found['error']:.1g}")
            print("| " + " | ".join(map(str, (*cells, *times))) + " |", flush=True)


if __name__ == "__main__":
    main()
