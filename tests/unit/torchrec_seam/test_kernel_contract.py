"""Goal: what our shardings, lookups and collections override exists upstream, with the arguments that they pass on. Layer: unit."""

import pytest

from torchrec_kstep.torchrec_seam import kernel
from torchrec_kstep.torchrec_seam.contract import NEEDED, Needed, missing


@pytest.mark.parametrize("needed", NEEDED, ids=str)
def test_upstream_has_what_is_overridden(needed: Needed) -> None:
    """A renamed method would be overridden in vain, and upstream's would run in its place without a word."""
    assert missing(needed) == ""


def test_what_upstream_lacks_is_named() -> None:
    known = NEEDED[0]
    assert missing(known._replace(name="make_lookup")).endswith("TwPooledEmbeddingSharding.make_lookup does not exist")
    assert missing(known._replace(owner="TwSharding")).endswith("TwSharding.create_lookup does not exist")
    assert missing(known._replace(arguments=frozenset({"device", "shelf"}))).endswith("create_lookup has no parameter shelf")


def test_a_kernel_of_others_is_still_known() -> None:
    assert kernel.CUSTOMIZED_KERNEL == "customized_kernel"


def test_synchronous_collectives_are_put_back_when_an_exception_passes() -> None:
    """Upstream's own context manager leaves them on."""
    context = kernel.collectives_for([[2, 3]])
    context.__enter__()
    assert kernel.comm_ops.get_use_sync_collectives()
    error = ValueError("passing")
    assert not context.__exit__(ValueError, error, None)
    assert not kernel.comm_ops.get_use_sync_collectives()
    with kernel.collectives_for([[2, 2], [5, 5, 5]]):
        assert not kernel.comm_ops.get_use_sync_collectives()
