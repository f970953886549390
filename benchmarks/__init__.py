"""Benchmarks against named peers, and the harness they share; see README.md beside this file."""
