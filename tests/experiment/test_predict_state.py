"""What predictions read of a model's state: running statistics and buffers, and files of private runs without."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from coterie.experiment import predict


def make(shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(shape[0], 4), nn.BatchNorm1d(4), nn.Linear(4, outputs))


def test_running_statistics_are_used_where_the_file_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "network", lambda name: make)
    state = make((3,), 2, 0).state_dict()
    state["1.running_mean"] += 5.0
    save_file(state, tmp_path / "whole.safetensors")
    net = predict._filled("mine:net", (3,), 2, tmp_path / "whole.safetensors")
    x = torch.ones(6, 3) * torch.arange(6.0)[:, None]
    with torch.no_grad():
        torch.testing.assert_close(net(x)[:1], net(x[:1]))
        assert float(net[1].running_mean.mean()) == 5.0
        private = {name: value for name, value in state.items() if "running" not in name and "tracked" not in name}
        save_file(private, tmp_path / "private.safetensors")
        by_batch = predict._filled("mine:net", (3,), 2, tmp_path / "private.safetensors")
        hidden = by_batch[1](by_batch[0](x))
    torch.testing.assert_close(hidden.mean(0), torch.zeros(4), atol=1e-5, rtol=0.0)
    save_file({**private, "more": torch.ones(1)}, tmp_path / "odd.safetensors")
    with pytest.raises(ValueError, match="more should be nothing"):
        predict._filled("mine:net", (3,), 2, tmp_path / "odd.safetensors")
