"""The only door to names that TorchRec and FBGEMM do not export; each module says why it needs them.

Importing anything from here first checks that the installed packages are ones whose inner interfaces are known, and hides
the few warnings that they give on every healthy run (`quiet` lists them).
"""

from torchrec_kstep.torchrec_seam.quiet import silence_known_warnings
from torchrec_kstep.torchrec_seam.versions import check_versions

check_versions()
silence_known_warnings()
