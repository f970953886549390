"""The version, alone in a module so that the build can read it without importing torch."""

__version__ = "0.1.0"
