"""Measurements of one machine: memory, drives, exchange between ranks. Each is bounded in time and leaves nothing behind."""

from torchrec_kstep.probing.drives import measure_drive
from torchrec_kstep.probing.exchange import measure_burst, measure_exchange
from torchrec_kstep.probing.memory import measure_memory

__all__ = ["measure_burst", "measure_drive", "measure_exchange", "measure_memory"]
