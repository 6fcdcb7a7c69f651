"""What workers in these tests load."""

from typing import Any

import torch
from torch import nn

from coterie.flower import ClientData


def load(node_config: dict[str, Any], run_config: dict[str, Any]) -> ClientData:
    """A client with as many rows as it is told."""
    x = torch.arange(2.0 * run_config["rows"]).reshape(-1, 2)
    return ClientData((x, torch.zeros(len(x), dtype=torch.int64)), nn.Linear(2, 3), "cross_entropy")


def fail(node_config: dict[str, Any], run_config: dict[str, Any]) -> ClientData:
    raise FileNotFoundError("rows.csv is not here")
