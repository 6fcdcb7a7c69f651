"""What is measured in a process of its own."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch


def apart(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What the function returns in a fresh process, which shares neither memory nor threads with this one.

    Its peak of memory is its own, and nothing that it starts goes on in this one.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(there, torch.get_num_threads(), function, arguments))
    child.start()
    there.close()
    try:
        return here.recv()
    finally:
        child.join()


def _send(there: Connection, threads: int, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    there.send(function(*arguments))
