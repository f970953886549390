"""Every wait of a process group has our deadline, never gloo's own of 30 minutes."""

import ast
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchrec_kstep
from torchrec_kstep.runtime import bound_waits

PACKAGE = Path(torchrec_kstep.__file__).parent
DEADLINE = timedelta(seconds=77)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=DEADLINE)
    assert dist.GroupMember.WORLD is not None
    yield dist.GroupMember.WORLD
    dist.destroy_process_group()


def test_groups_that_others_made_get_the_deadline(world: dist.ProcessGroup) -> None:
    theirs = dist.new_group([0])
    assert timeout_of(theirs) == timedelta(minutes=30)  # what this guards against
    bound_waits(DEADLINE)
    assert timeout_of(theirs) == DEADLINE
    assert timeout_of(world) == DEADLINE


def calls(names: set[str]) -> list[tuple[str, ast.Call]]:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in names:
                found.append((f"{path.relative_to(PACKAGE)}:{node.lineno}", node))
    return found


def test_every_group_of_ours_is_made_with_a_timeout() -> None:
    made = calls({"init_process_group", "new_group", "new_subgroups", "init_device_mesh"})
    without = [where for where, call in made if "timeout" not in {keyword.arg for keyword in call.keywords}]
    own_method = [where for where, call in made if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "job"]
    assert made
    assert [where for where in without if where not in own_method] == []
