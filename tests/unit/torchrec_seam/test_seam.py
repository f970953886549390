"""The seam: versions are checked with one readable error, private names are there, known warnings alone are hidden.

Layer: unit.
"""

import inspect
import logging
import warnings

import pytest
from torchrec.distributed.types import ShardingPlan

from torchrec_kstep.errors import IncompatibleTorchRecError
from torchrec_kstep.torchrec_seam import optim, pipeline, planning, quiet, sharding
from torchrec_kstep.torchrec_seam.versions import FBGEMM_VERSIONS, TORCHREC_VERSIONS, check_versions

GOOD = {"torchrec": TORCHREC_VERSIONS[0], "fbgemm-gpu-cpu": FBGEMM_VERSIONS[0]}


@pytest.mark.parametrize("changes", [{}, {"torchrec": "1.8.0+cpu"}, {"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"}])
def test_proven_versions_pass(changes: dict[str, str | None]) -> None:
    """Otherwise the CUDA set, or a local build of the right version, would be refused."""
    check_versions((GOOD | changes).get)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torchrec": None}, "torchrec is not installed"),
        ({"torchrec": "1.9.0"}, "torchrec 1.9.0: expected 1.8.0"),
        ({"torchrec": "1.4.0"}, "torchrec 1.4.0: expected 1.8.0"),
        ({"fbgemm-gpu-cpu": None}, "neither fbgemm-gpu nor fbgemm-gpu-cpu is installed"),
        ({"fbgemm-gpu-cpu": "1.7.0"}, "fbgemm-gpu-cpu 1.7.0: expected 1.8.0"),
        ({"fbgemm-gpu": "1.8.0"}, "fbgemm-gpu and fbgemm-gpu-cpu are both installed and overwrite each other's files"),
    ],
)
def test_other_versions_end_in_one_error_that_says_what_to_install(changes: dict[str, str | None], expected: str) -> None:
    """Otherwise the user would meet an AttributeError deep inside a private interface."""
    with pytest.raises(IncompatibleTorchRecError, match=expected) as error:
        check_versions((GOOD | changes).get)
    assert "pip install torchrec==1.8.0" in str(error.value)


def test_all_findings_are_told_at_once() -> None:
    """Otherwise users would reinstall twice."""
    with pytest.raises(IncompatibleTorchRecError) as error:
        check_versions({"torchrec": "1.9.0", "fbgemm-gpu": "1.9.0", "fbgemm-gpu-cpu": "1.8.0"}.get)
    assert str(error.value).count("\n  ") == 3


@pytest.mark.parametrize(
    ("call", "parameters"),
    [
        (sharding.EmbeddingBagCollectionSharder.__init__, {"fused_params"}),
        (sharding.EmbeddingBagCollectionSharder.sharding_types, {"compute_device_type"}),
        (sharding.EmbeddingBagCollectionSharder.compute_kernels, {"sharding_type", "compute_device_type"}),
        (sharding.EmbeddingBagCollectionSharder.shard, {"module", "params", "env", "device"}),
        (planning.FixedPercentageStorageReservation.__init__, {"percentage"}),
        (pipeline.TrainPipelineSparseDist.__init__, {"model", "optimizer", "device", "custom_model_fwd"}),
        (pipeline.TrainPipelineBase.__init__, {"model", "optimizer", "device", "custom_model_fwd"}),
        (
            optim.ShardedTensor._init_from_local_shards_and_global_metadata,
            {"local_shards", "sharded_tensor_metadata", "process_group"},
        ),
    ],
)
def test_private_calls_take_the_arguments_that_we_pass(call: object, parameters: set[str]) -> None:
    """Otherwise a new release would fail in the first step instead of here."""
    assert parameters <= set(inspect.signature(call).parameters)  # type: ignore[arg-type]


def test_private_values_are_there() -> None:
    """Otherwise a renamed member would be found at training time only."""
    assert {kernel.value for kernel in sharding.EmbeddingComputeKernel} >= {"dense", "fused"}
    assert {"EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"} <= {kind.name for kind in sharding.EmbOptimType}
    assert {"path", "plan"} & set(ShardingPlan.__dataclass_fields__)


def test_topologies_have_the_ranks_and_memory_given() -> None:
    """Otherwise plans would be made for TorchRec's default machine of 128 GB a rank."""
    topology = planning.cpu_topology(4, 2, 12345)
    assert (topology.world_size, topology.local_world_size, topology.compute_device) == (4, 2, "cpu")
    assert [device.storage.ddr for device in topology.devices] == [12345] * 4


def test_known_warnings_are_hidden_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a healthy run would bury the user in warnings, or a real one would be lost among them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet.silence_known_warnings.__wrapped__()
        warnings.warn("`torch.distributed.reduce_scatter_tensor` is deprecated. Use another", FutureWarning, stacklevel=1)
        warnings.warn("`broadcast_sizes` is deprecated", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["`broadcast_sizes` is deprecated"]
    logger = logging.getLogger("torchrec.distributed.utils")
    logger.warning("Compute Kernel is dense, caching params will be ignored")
    logger.warning("Compute Kernel is gone")
    assert [record.getMessage() for record in caplog.records] == ["Compute Kernel is gone"]


def test_the_planners_warning_of_replicas_is_hidden_during_planning_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise every replicated table would look like a fault, or later messages of that kind would be lost."""
    with planning.without_replica_warnings():
        logging.warning("Sharding spec not found for a.b")
        logging.warning("something else")
    logging.warning("Sharding spec not found for c.d")
    assert [record.getMessage() for record in caplog.records] == ["something else", "Sharding spec not found for c.d"]
