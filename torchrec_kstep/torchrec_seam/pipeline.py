"""TorchRec's train pipelines, under one import for the training loop."""

from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

__all__ = ["TrainPipelineBase", "TrainPipelineSparseDist"]
