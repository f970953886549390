"""Memory of batches, used again once nobody refers to it: fresh pages cost as much time as the copying that fills them."""

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

_MAX_IDLE = 16  # pieces; a batch has two, and as many batches are on their way as are made ahead


class BatchMemory:
    """Lends arrays and takes their memory back by itself; shared by the streams of a set and by all threads."""

    def __init__(self) -> None:
        """Starts with no memory."""
        self._idle: deque[bytearray] = deque(maxlen=_MAX_IDLE)  # its methods need no lock, so they may run anywhere

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Returns a contiguous array of any content; its memory comes back when all arrays and tensors that share it are gone."""
        memory = self._take(math.prod(shape) * dtype.itemsize)
        # An array over a bytearray stays the base of all its views; one over another array would be skipped by them.
        lent = np.frombuffer(memory, dtype)
        weakref.finalize(lent, self._idle.append, memory).atexit = False
        return lent.reshape(shape)

    def _take(self, num_bytes: int) -> bytearray:
        for _ in range(len(self._idle)):
            try:
                memory = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if len(memory) == num_bytes:
                return memory
            self._idle.appendleft(memory)
        return bytearray(num_bytes)
