"""What the settings of methods and problems mean, in one line each.

One glossary feeds `help()`, `coterie list methods NAME`, `coterie list problems NAME` and the reference pages.
It has the settings that several factories mean alike. A factory that means something more special says so under `Args:`
in its own docstring, which goes before the glossary.
"""

METHOD_SETTINGS = {
    "ask": "which clients are asked in weighted means: all, or only those with a positive weight",
    "batch": "rows per local gradient; 'all' uses every row of the client",
    "cap": "largest weight of one client; keeps the weights spread",
    "convexity": "μ, known strong convexity of the local losses; 0 if unknown",
    "data": "which rows of the target judge the weights: held-out, training, or fresh blocks of held-out rows",
    "error_feedback": "whether clients add to their next update what compression lost",
    "every": "rounds between two updates of the weights",
    "everyone": "train one personal model per client instead of one model for the target",
    "inner_rounds": "T, inner rounds per outer round",
    "lipschitz": "ℓ, an upper bound of the inner Hessian's largest eigenvalue; scales the Neumann series",
    "local_steps": "local steps of each client per round",
    "mirror": "mirror descent on all judging rows (md) or on a fresh batch per step (smd)",
    "mirror_step": "α, step size of the mirror descent on the weights",
    "mirror_steps": "mirror steps on the weights per round",
    "outer_step": "α, step size of the outer variable or of the weights",
    "personal": "what stays at the clients: norm (batch norm), the number of last layers, or names of parameters",
    "redraw": "draw the clients of each phase of a round anew, as Algorithm 3 does, instead of once per round",
    "restart": "start the weights uniformly in every round instead of where the last round ended",
    "series": "how the inverse Hessian is applied: Neumann series with all or random rows, or conjugate gradients",
    "server": "the server's rule: sgd(η), momentum(η, β), adam(η, β, β₂, τ) or yogi(…); numbers may be left out",
    "server_step": "step size of the server",
    "sketch": "kind of the random projection that all clients share",
    "sketch_seed": "seed of the random projection",
    "solver": "how the target is asked: at each mirror step, once (quadratic), or by secure sums (projected, lagged)",
    "step": "γ, step size of the model",
    "target_batch": "rows per gradient of the target's loss",
    "terms": "N, terms of the series for the inverse Hessian",
    "tie": "τ of the penalty (τ/2)‖w − 1/n‖² on the weights, by which equally good clients get equal weights; 0 is off",
    "weights": "weights of the average: in proportion to the clients' numbers of rows, or equal",
}

PROBLEM_SETTINGS = {
    "alpha": "α of the Dirichlet distribution, where the partition is dirichlet or quantity; smaller is more unequal",
    "attack": "what attacking clients send instead of their update; none switches attacks off",
    "attackers": "how many clients attack: a number, or a share",
    "classes": "classes per client, where the partition is by classes",
    "clients": "number of clients",
    "data": "data set; `coterie data list` shows which are available",
    "dimension": "number of parameters",
    "everyone": "every client is a target, with validation and test rows of its own",
    "friends": "number of clients that draw from the target's distribution; they come first",
    "hidden": "hidden units",
    "model": "network by name; `coterie list models` shows all",
    "partition": "how rows are distributed over the clients",
    "ridge": "strength of the quadratic penalty that makes a level strongly convex",
    "rows": "training rows per client",
    "selection": "test rows set apart for choosing among models and settings; they train nothing",
    "skew": "α of a Dirichlet distribution that makes the clients' sizes and classes unequal; equal if not set",
    "strength": "strength of the attack; each attack has a default",
    "test": "test rows",
    "validation": "validation rows of the target",
}
