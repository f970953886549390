"""Only the list of compiled extensions; everything else is in setup.cfg."""

from glob import glob

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = sorted(source for room in ("common", "storage", "cache", "tier", "compute", "ops") for source in glob(f"kernels/{room}/*.cpp"))
FLAGS = ["-O3", "-std=c++17", "-march=x86-64-v3", "-fno-math-errno", "-fopenmp", "-Wall", "-Wextra"]

setup(
    ext_modules=[
        CppExtension("torchrec_kstep._kernels", SOURCES, include_dirs=["kernels"], extra_compile_args=FLAGS, extra_link_args=["-fopenmp"])
    ]
    if SOURCES
    else [],
    cmdclass={"build_ext": BuildExtension},
)
