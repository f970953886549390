"""What `routes` and bounds of drives may say. Layer: unit."""

import pytest

from torchrec_kstep.config.core_list import parse_cores
from torchrec_kstep.config.load import load
from torchrec_kstep.config.schema import RunConfig
from torchrec_kstep.errors import ConfigError

SSD = ["tiers=dram_ssd", "tiers.ssd_paths=[/a,/b]"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["routes=off", "routes.interfaces=[eth0]"], "routes.interfaces with routes.name=off: it is not read; choose routes=auto"),
        (["routes.cpus=['0-']"], "routes.cpus: cannot read '0-' as cores: expected numbers and ranges such as '0-3,8'"),
        (["routes.cpus=['3-1']"], "routes.cpus: cannot read '3-1' as cores: expected an ascending range below 65536"),
        (["routes.interfaces=['']"], "routes.interfaces: a name is empty"),
        (["routes.drive_shares=[1]"], "routes.drive_shares has 1 entries with tiers.name=dram"),
        ([*SSD, "routes.drive_shares=[1]"], "routes.drive_shares has 1 entries with 2 tiers.ssd_paths: expected one for each"),
        ([*SSD, "routes.drive_shares=[0,0]"], "routes.drive_shares are all 0"),
        ([*SSD, "tiers.ssd_limits=[1MB/s]"], "tiers.ssd_limits has 1 entries with 2 tiers.ssd_paths"),
        (["routes.cores=socket"], "routes.cores: 'socket' is no choice"),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(RunConfig, "train", overrides)
    assert said in str(refused.value)


def test_what_can_be_meant_is_taken() -> None:
    config = load(RunConfig, "train", [*SSD, "routes.drive_shares=[9,1]", "routes.cpus=['0-3,8',4]", "tiers.ssd_limits=['',50MB/s]"])
    assert config.routes.cpus == ["0-3,8", "4"]
    assert config.tiers.ssd_limits == ["", "50MB/s"]


@pytest.mark.parametrize(("text", "cores"), [("0", (0,)), ("0-2,1", (0, 1, 2)), (" 8 , 1-2", (1, 2, 8))])
def test_lists_of_cores(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores
