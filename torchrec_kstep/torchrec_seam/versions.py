"""Which TorchRec this package was proven against, and one readable error where another one is installed."""

from collections.abc import Callable
from importlib import metadata

from torchrec_kstep.errors import IncompatibleTorchRecError

TORCHREC_VERSIONS = ("1.8.0",)  # run end to end by the test suite
FBGEMM_VERSIONS = ("1.8.0",)
FBGEMM_PACKAGES = ("fbgemm-gpu", "fbgemm-gpu-cpu")  # CUDA build and CPU build of the same module


def check_versions(installed: Callable[[str], str | None] | None = None) -> None:
    """Checks the installed TorchRec and FBGEMM.

    Args:
        installed: maps a package's name to its version, None where it is absent; by default the running interpreter's.

    Raises:
        IncompatibleTorchRecError: lists every finding and the command that mends them.
    """
    version_of = installed or _installed_version
    findings = []
    torchrec = version_of("torchrec")
    if torchrec is None:
        findings.append("torchrec is not installed")
    elif _release(torchrec) not in TORCHREC_VERSIONS:
        findings.append(f"torchrec {torchrec}: expected {' or '.join(TORCHREC_VERSIONS)}")
    fbgemm = {name: version for name in FBGEMM_PACKAGES if (version := version_of(name)) is not None}
    if not fbgemm:
        findings.append(f"neither {' nor '.join(FBGEMM_PACKAGES)} is installed")
    if len(fbgemm) > 1:
        findings.append(f"{' and '.join(fbgemm)} are both installed and overwrite each other's files: uninstall both, then install one")
    findings += [
        f"{name} {version}: expected {' or '.join(FBGEMM_VERSIONS)}"
        for name, version in fbgemm.items()
        if _release(version) not in FBGEMM_VERSIONS
    ]
    if findings:
        raise IncompatibleTorchRecError(
            "this package extends inner interfaces of TorchRec that change between releases:\n  "
            + "\n  ".join(findings)
            + f"\nInstall the proven set: pip install torchrec=={TORCHREC_VERSIONS[-1]} and fbgemm-gpu=={FBGEMM_VERSIONS[-1]} "
            f"(on CPU: fbgemm-gpu-cpu=={FBGEMM_VERSIONS[-1]})"
        )


def _installed_version(package: str) -> str | None:
    """Returns the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> str:
    """Drops a local label such as `+cpu`."""
    return version.split("+", 1)[0]
