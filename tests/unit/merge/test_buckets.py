"""Cutting rounds into buckets, searched by hypothesis."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.merging import dram_group
from torchrec_kstep.merge.buckets import BucketCutter
from torchrec_kstep.merge.layout import lay_out
from torchrec_kstep.ops.batch import TableSpec

SIZES = (5, 400, 100)
LAYOUT = lay_out([dram_group(tables=[TableSpec(f"t{index}", size, 2, index) for index, size in enumerate(SIZES)])], None)
touched = st.tuples(*(st.sets(st.integers(0, size - 1)).map(sorted) for size in SIZES))


@given(
    replicas=st.lists(touched, min_size=1, max_size=4),
    row_bytes=st.tuples(*(st.integers(1, 40) for _ in SIZES)),
    bucket_bytes=st.integers(1, 4000),
)
def test_buckets_hold_every_row_once_and_no_more_bytes_than_stated(
    replicas: list[tuple[list[int], ...]], row_bytes: tuple[int, ...], bucket_bytes: int
) -> None:
    num_touched = torch.tensor([[len(rows) for rows in own] for own in replicas])
    tensors = [[torch.tensor(rows, dtype=torch.int64) for rows in own] for own in replicas]
    cutter = BucketCutter(LAYOUT, row_bytes, num_touched, bucket_bytes)
    samples = [torch.empty(0, dtype=torch.int64)] * len(replicas)
    if not cutter.is_one_bucket:
        samples = [cutter.sample(replica, rows) for replica, rows in enumerate(tensors)]
        assert [sample.numel() for sample in samples] == cutter.num_samples()
    buckets = cutter.cut(samples)
    bound = max(bucket_bytes, 8 * len(replicas) * max(row_bytes))
    for own in tensors:
        for table, rows in zip(LAYOUT, own, strict=True):
            pieces = [bucket.rows_of(table, rows) for bucket in buckets if table in bucket.tables]
            assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *pieces]), rows)
    for bucket in buckets:
        counts = [[bucket.rows_of(table, rows).numel() for table, rows in zip(LAYOUT, own, strict=True)] for own in tensors]
        assert sum(count * size for own in counts for count, size in zip(own, row_bytes, strict=True)) <= bound
    total = sum(int(n) * size for own in num_touched for n, size in zip(own, row_bytes, strict=True))
    assert len(buckets) <= 1 + 2 * total / bound  # at least half full, but for the last
