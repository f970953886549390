"""Goal: a device that is not there is refused in one line, before any process group. Layer: runtime."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchrec_kstep import train
from torchrec_kstep.errors import ConfigError
from torchrec_kstep.runtime import choose_device
from torchrec_kstep.world import World


def devices(monkeypatch: pytest.MonkeyPatch, num_devices: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)


@pytest.mark.parametrize(
    ("num_devices", "local_rank", "is_there"), [(0, 0, False), (1, 0, True), (1, 1, False), (8, 7, True), (8, 8, False)]
)
def test_each_rank_of_a_host_needs_a_device_of_its_own(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, local_rank: int, is_there: bool
) -> None:
    devices(monkeypatch, num_devices)
    world = World(local_rank, 16, local_rank, 16)
    assert choose_device("cpu", world) == torch.device("cpu")
    if is_there:
        assert choose_device("cuda", world) == torch.device("cuda", local_rank)
    else:
        with pytest.raises(ConfigError, match=rf"train\.device=cuda: rank {local_rank} needs CUDA device {local_rank} .*train\.device=cpu"):
            choose_device("cuda", world)


def test_training_without_the_device_ends_before_any_process_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices(monkeypatch, 0)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was formed"))
    assert train.main(["train.device=cuda", "planner=dense", f"run_dir={tmp_path / 'run'}"]) == 2
    told = capsys.readouterr().err
    assert told.count("train.device=cuda: rank 0 needs CUDA device 0 of its host but sees none") == 1
    assert "Traceback" not in told
    assert not (tmp_path / "run").exists()
