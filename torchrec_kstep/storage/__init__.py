"""Tables whose rows live on SSD behind a cache in DRAM: opening, prefetching, snapshots, statistics, estimates, export.

`tiered_tables.TieredTables` is the row group that trains; `snapshot.Snapshot` reads a committed state without a lock. The
store itself is C++ (`kernels/storage`, `kernels/tier`); docs/row_store.md explains it and docs/format.md its bytes.
"""
