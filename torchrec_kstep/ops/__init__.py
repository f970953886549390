"""Embedding kernels: typed wrappers of the compiled ops, their autograd and fake kernels, and the same ops in plain PyTorch.

Nothing is loaded on import; the first use of an op loads the compiled library (`_library.load`).
"""
