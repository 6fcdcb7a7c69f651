"""python -m coterie.numerics.compile_graph FOLDER: one graph into one shared library, for `programs.Builder`."""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from coterie.numerics.programs import namespace, program_name
from coterie.storage import write_atomically


def main(place: Path) -> None:
    """Compile what graph.json in this folder describes."""
    order = json.loads((place / "graph.json").read_text(encoding="utf-8"))
    torch.set_num_threads(order["threads"])
    inputs = [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in order["forms"]]
    names = namespace()
    exec(order["text"], names)  # written by `programs.record` of the parent process, from torch's own operations
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = make_fx(lambda *given: names["forward"](None, *given), tracing_mode="fake")(*inputs)
        options = {**order["options"], "cpp.threads": order["threads"]}
        made = Path(str(torch._inductor.aot_compile(graph, tuple(inputs), options=options)))
    os.umask(0o077)  # a program that others may write to is not loaded
    library = made.read_bytes()
    write_atomically(Path(order["folder"], program_name(order["key"], library)), library)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
