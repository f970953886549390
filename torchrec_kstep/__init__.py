"""TorchRec extension for click-through-rate models larger than memory."""

from torchrec_kstep._version import __version__

__all__ = ["__version__"]
