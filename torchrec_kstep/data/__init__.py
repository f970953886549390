"""Data sets: raw logs to prepared files, and prepared files to the batches of each rank."""

from torchrec_kstep.data.collate import Bags, make_batch, make_sparse
from torchrec_kstep.data.dataset import BatchStream, Dataset
from torchrec_kstep.data.opening import ensure_prepared, open_dataset
from torchrec_kstep.data.order import BatchOrder

__all__ = ["Bags", "BatchOrder", "BatchStream", "Dataset", "ensure_prepared", "make_batch", "make_sparse", "open_dataset"]
