"""Click-through-rate models as plain modules over `EmbeddingBagCollection`; nothing here knows of ranks or shards."""

from torchrec_kstep.models.build import MODELS, build_model
from torchrec_kstep.models.task import CTRTask

__all__ = ["MODELS", "CTRTask", "build_model"]
