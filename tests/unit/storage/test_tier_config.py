"""Layer 1, pure: sizes and places of the tiers, their checks, and the share of each rank."""

from pathlib import Path

import pytest

from torchrec_kstep.errors import ConfigError
from torchrec_kstep.tier_config import TierConfig
from torchrec_kstep.units import GIB, KIB, MIB


def test_sizes_are_texts_or_bytes() -> None:
    config = TierConfig("8GiB", [Path("/nvme0/run1"), "/nvme1/run1"], ssd_bytes="1TiB", segment_bytes=16 * MIB)
    assert (config.num_dram_bytes, config.num_ssd_bytes, config.num_segment_bytes) == (8 * GIB, 1024 * GIB, 16 * MIB)
    assert config.ssd_paths == ("/nvme0/run1", "/nvme1/run1")
    assert TierConfig(8 * GIB, "/nvme0/run1").ssd_paths == ("/nvme0/run1",)
    assert hash(config) == hash(TierConfig("8GiB", ["/nvme0/run1", "/nvme1/run1"], ssd_bytes="1TiB", segment_bytes="16MiB"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dram_bytes": "8"}, "dram_bytes: cannot read '8'"),
        ({"dram_bytes": -1}, "dram_bytes is -1"),
        ({"ssd_paths": []}, "0 ssd_paths, expected 1 to 16"),
        ({"ssd_paths": ["a", "./a"]}, "given twice"),
        ({"segment_bytes": "1KiB"}, "segment_bytes is 1 KiB, expected 64 KiB to 1 GiB"),
        ({"ssd_bytes": "100MiB"}, "at least 4 segments of 64 MiB"),
        ({"prefetch_depth": -1}, "prefetch_depth is -1"),
        ({"prefetch_depth": 9}, r"lookahead is 8, expected prefetch_depth \(9\)"),
        ({"io_backend": "aio"}, "expected auto, uring, threads"),
        ({"space_factor": 1.0}, "at least 1.1"),
        ({"space_factor": float("nan")}, "at least 1.1"),
        ({"queue_depth": 0}, "queue_depth is 0"),
    ],
)
def test_every_wrong_value_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TierConfig(**{"dram_bytes": 0, "ssd_paths": ["a"], **values})


def test_all_faults_come_in_one_error() -> None:
    with pytest.raises(ConfigError, match=r"prefetch_depth is -1.*queue_depth is 0"):
        TierConfig(0, ["a"], prefetch_depth=-1, queue_depth=0)


def test_ranks_share_a_host() -> None:
    config = TierConfig("8GiB", ["/a", "/b"], ssd_bytes="1GiB")
    shares = [config.for_rank(rank, 4) for rank in range(4)]
    assert {share.dram_bytes for share in shares} == {2 * GIB}
    assert {share.ssd_bytes for share in shares} == {256 * MIB}
    assert shares[3].ssd_paths == ("/a/rank-3", "/b/rank-3")
    assert len({path for share in shares for path in share.ssd_paths}) == 8
    with pytest.raises(ConfigError, match="divided over 8 ranks is 128 MiB each"):
        config.for_rank(0, 8)
    with pytest.raises(ConfigError, match="local rank 4 of 4"):
        config.for_rank(4, 4)
    assert TierConfig(0, ["/a"], segment_bytes=64 * KIB).for_rank(0, 8).ssd_bytes is None


def test_two_names_of_one_folder_are_one_folder(tmp_path: Path) -> None:
    """Otherwise the store would meet its own lock there, and tell of another process that nobody can find."""
    (tmp_path / "drive").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "drive")
    with pytest.raises(ConfigError, match="given twice"):
        TierConfig(0, [tmp_path / "drive", tmp_path / "link"])
