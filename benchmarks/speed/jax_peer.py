"""The peer JAX (pip install 'coterie[bench]'): the rounds of `jax_rounds`, compiled, on as many threads as torch has.

Row numbers are drawn beforehand, as for the limits, and cost this side nothing; nor does compiling. A call ends when
its result is ready.
"""

import os
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.speed.measure import Side


def missing() -> str | None:
    """Why JAX cannot be run, if so."""
    try:
        _import()
    except ImportError as error:
        return f"not installed ({error}); pip install 'coterie[bench]'"
    return None


def version() -> str | None:
    return None if missing() else _import().__version__


def _import() -> Any:
    """jax; the first import fixes the threads of this process: NPROC those of XLA, the flag those inside a product."""
    threads = torch.get_num_threads()
    os.environ.setdefault("NPROC", str(threads))
    several = str(threads > 1).lower()
    os.environ.setdefault("XLA_FLAGS", f"--xla_cpu_multi_thread_eigen={several} intra_op_parallelism_threads={threads}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)  # a second thread would have nothing to do
    return jax


def side(name: str, *arguments: Any, **settings: Any) -> Side:
    """The round of that name, compiled; tensors among the arguments become arrays of JAX."""
    jax = _import()
    from benchmarks.speed import jax_rounds

    arrays = jax.tree.map(lambda tensor: jax.numpy.asarray(tensor.numpy()), arguments)
    round = jax.jit(partial(getattr(jax_rounds, name), **settings)).lower(*arrays).compile()

    def run() -> Tensor:
        return torch.from_numpy(np.array(round(*arrays).block_until_ready()))

    return run
