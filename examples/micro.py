"""MeritFed in NumPy: train a model for one target with the help of others, and learn who helps.

The target has enough rows to judge a model and too few to train one. Clients have more rows and lend their gradients.
Some are friends, whose rows are distributed like the target's; the others are strangers; nobody knows who is who.
Let L_0 be the target's loss and L_k that of client k. One round at the model x, with weights w on the simplex Δ:

    1.  every client sends its gradient                g_k = ∇L_k(x)
    2.  the target looks for the best weights          min over w ∈ Δ of φ(w) = L_0(x − γ Σ_k w_k g_k)
        by steps of mirror descent                     w_k ← w_k exp(−α ∂φ/∂w_k) / Z
        along the derivative                           ∂φ/∂w_k = −γ ⟨∇L_0(x − γ Σ_j w_j g_j), g_k⟩
    3.  the model moves along the weighted gradient    x ← x − γ Σ_k w_k g_k

A client whose gradient points downhill for the target gains weight, whatever its data are; rows never move.
Tupitsa, Horváth, Takáč and Gorbunov: Federated Learning Can Find Friends That Are Advantageous (2024).

Run it: python micro.py

This file is the algorithm; everything else is speed and safety.
"""

import numpy as np

# A model of one matrix: softmax regression. x is [features, classes], X is [rows, features], y is [rows].


def softmax(scores):
    """Probabilities from scores, row by row."""
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def gradient(x, X, y):
    """∇L(x), where L is the mean of −log(probability of the right class)."""
    error = softmax(X @ x)
    error[np.arange(len(y)), y] -= 1.0
    return X.T @ error / len(y)


def accuracy(x, X, y):
    """The share of rows whose most probable class is the right one."""
    return np.mean((X @ x).argmax(axis=1) == y)


# The algorithm.


def mirror_step(w, slope, alpha):
    """One step of mirror descent on the simplex; a common part of the slopes cancels, so no exponent is positive."""
    w = w * np.exp(-alpha * (slope - slope.min()))
    return w / w.sum()


def meritfed_round(x, w, clients, target, *, gamma, alpha, steps):
    """One round of MeritFed: the new model and the new weights."""
    G = np.stack([gradient(x, X, y) for X, y in clients])  # 1. one gradient per client
    for _ in range(steps):  # 2. the target judges the step that these weights would take
        v = gradient(x - gamma * np.tensordot(w, G, 1), *target)
        w = mirror_step(w, -gamma * np.tensordot(G, v, 2), alpha)
    return x - gamma * np.tensordot(w, G, 1), w  # 3. take it


# A federation to try it on.


def federation(seed=0, friends=4, strangers=8, features=20, classes=4, rows=60):
    """Clients (friends first), the target, rows for a test, and a start; strangers call the classes by wrong names."""
    random = np.random.default_rng(seed)
    truth = random.normal(size=(features, classes))

    def draw(n, shift=0):
        X = random.normal(size=(n, features))
        noisy = X @ truth + 0.5 * random.normal(size=(n, classes))
        return X, (noisy.argmax(axis=1) + shift) % classes

    clients = [draw(rows) for _ in range(friends)]
    clients += [draw(rows, shift=1 + k % (classes - 1)) for k in range(strangers)]
    return clients, draw(40), draw(2000), np.zeros((features, classes))


def main(rounds=100, gamma=1.0, alpha=0.5, steps=5):
    """Train three ways on the same data, and print who helped."""
    friends = 4
    clients, target, test, start = federation(friends=friends)
    equal = np.full(len(clients), 1 / len(clients))
    alone, average, x, w = start, start, start, equal
    for _ in range(rounds):
        alone = alone - gamma * gradient(alone, *target)
        average, _ = meritfed_round(average, equal, clients, target, gamma=gamma, alpha=alpha, steps=0)
        x, w = meritfed_round(x, w, clients, target, gamma=gamma, alpha=alpha, steps=steps)
    print("Who helped:")
    for k, weight in enumerate(w):
        print(f"  {'friend  ' if k < friends else 'stranger'} {k:2d}  {weight:.3f}  {'#' * round(60 * weight)}")
    print(f"\nThe {friends} friends hold {w[:friends].sum():.3f} of the weight. Accuracy on the test rows:")
    for name, model in (("alone", alone), ("average of all", average), ("learned weights", x)):
        print(f"  {name:16s} {accuracy(model, *test):.3f}")


if __name__ == "__main__":
    main()
