"""The compiled extension and the package list; everything else is in setup.cfg."""

import os
import platform
import shutil
import sys
from glob import glob

from setuptools import find_packages, setup

ROOMS = ("common", "storage", "cache", "tier", "compute", "ops")
SOURCES = sorted(source for room in ROOMS for source in glob(f"kernels/{room}/*.cpp"))
HEADERS = sorted(header for room in ROOMS for header in glob(f"kernels/{room}/*.h"))
# Baseline for every x86-64 machine since 2013; wider vectors are chosen at run time.
ARCHITECTURE_FLAGS = ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
# Without contraction to FMA the kernels give the same bits on AVX2 and AVX-512 and in the PyTorch reference.
FLAGS = ["-O3", "-std=c++17", *ARCHITECTURE_FLAGS, "-fno-math-errno", "-ffp-contract=off", "-fopenmp", "-Wall", "-Wextra"]
COMPILING_COMMANDS = {"build", "build_ext", "bdist_wheel", "editable_wheel", "develop", "install"}


def compiled_extension() -> dict[str, object]:
    """Returns the arguments of `setup()` that build `torchrec_kstep._kernels`; ends with one line where that cannot work."""
    if not SOURCES or os.environ.get("KSTEP_WITHOUT_KERNELS"):  # set-up compiles them in place, and only what changed
        return {}
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        sys.exit(f"torchrec_kstep: no C++ compiler {compiler!r} found: install g++ 9 or newer (Debian: apt-get install g++), or set CXX")
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError as error:
        sys.exit(f"torchrec_kstep: compiling needs torch in the same environment ({error}): pip install torch==2.13.0, then try again")
    extension = CppExtension(
        "torchrec_kstep._kernels",
        SOURCES,
        depends=HEADERS,
        include_dirs=[os.path.abspath("kernels")],  # absolute: ninja compiles from the build folder
        extra_compile_args=FLAGS,
        extra_link_args=["-fopenmp"],
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildExtension}}


# `conf/` stands beside the package in the checkout and is `torchrec_kstep._conf` once installed (package_dir in setup.cfg).
PACKAGES = [*find_packages(include=["torchrec_kstep", "torchrec_kstep.*"]), "torchrec_kstep._conf"]

setup(packages=PACKAGES, **(compiled_extension() if COMPILING_COMMANDS & set(sys.argv) else {}))
