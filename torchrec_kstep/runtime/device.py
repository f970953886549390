"""Which device a rank computes on, refused before anything waits for it."""

import torch

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.world import World


def choose_device(name: str, world: World) -> torch.device:
    """Returns the device of this rank. Not collective; starts nothing on the device.

    Args:
        name: `train.device`, cpu or cuda.
        world: the ranks: local rank r of a host computes on the host's r-th CUDA device.

    Raises:
        ConfigError: there is no such device here.
    """
    if name == "cpu":
        return torch.device("cpu")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if world.local_rank >= num_devices:
        found = f"sees {num_devices} of them" if num_devices else "sees none"
        build = "" if torch.version.cuda else f", and torch {torch.__version__} is built without CUDA"
        raise ConfigError(
            f"train.device={name}: rank {world.rank} needs CUDA device {world.local_rank} of its host but {found}{build}; "
            "choose train.device=cpu, or start at most one rank per device"
        )
    return torch.device(name, world.local_rank)
