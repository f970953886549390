"""The Python of the documents runs as it is printed, around a model and batches of the reader's own. Under torchrun, on two ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT

BEFORE = """\
import os
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.planner import Topology

RANK = int(os.environ["RANK"])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tables = [EmbeddingBagConfig(name=f"t{i}", num_embeddings=100, embedding_dim=8, feature_names=[f"f{i}"]) for i in range(2)]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.over = torch.nn.Linear(16, 1)

    def forward(self, batch):
        logits = self.over(self.tables(batch[0]).values()).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch[1]), logits.detach()


def batches(num):
    random = torch.Generator().manual_seed(RANK)
    for _ in range(num):
        ids, lengths = torch.randint(0, 100, (16,), generator=random), torch.ones(16, dtype=torch.int64)
        yield KeyedJaggedTensor(keys=["f0", "f1"], values=ids, lengths=lengths), torch.randint(0, 2, (8,), generator=random).float()


model, loader = Model(), list(batches(6))
tables = model.tables.embedding_bag_configs()
topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
"""
STEPS = """
for batch in loader:
    optimizer.zero_grad()
    dmp(batch)[0].backward()
    optimizer.step()
"""


def python_of(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / document).read_text(), re.MULTILINE | re.DOTALL)


def torchrun(script: str, folder: Path) -> None:
    (folder / "script.py").write_text(script.replace("/nvme0", str(folder)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(folder / "script.py")]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tables_of_a_model_of_ones_own(tmp_path: Path) -> None:
    with_ours, with_upstreams = python_of("tiered_sharding.md")
    again = "del dmp, optimizer\nsharder = TieredEmbeddingBagCollectionSharder(AdamSpec(lr=1e-3))\n"
    made = "dmp = DistributedModelParallel(model, plan=plan, sharders=[sharder])\noptimizer = dmp.fused_optimizer\n"
    torchrun(BEFORE + with_ours + STEPS + again + "model = Model()\n" + with_upstreams + made + STEPS, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_replicas_of_a_model_of_ones_own(tmp_path: Path) -> None:
    torchrun(BEFORE + python_of("kstep.md")[0].replace("from_torchrun()", "from_torchrun(1)"), tmp_path)
