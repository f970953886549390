"""Merge rounds: replicas exchange what they learned of the rows they touched (`docs/kstep.md`).

`RowMerger` does it for tables in row groups, over a transport between processes or within one.
"""
