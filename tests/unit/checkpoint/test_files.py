"""Layer: checkpoint. Goal: what the official safetensors library reads is what was given, and damage is always found."""

import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from torchrec_kstep.checkpoint.files import DTYPES, Entry, check_file_name, verify_file, write_safetensors
from torchrec_kstep.errors import CheckpointError

shapes = st.lists(st.integers(0, 4), max_size=3)


def entry(key: str, tensor: torch.Tensor) -> Entry:
    return Entry(key, tensor.dtype, tensor.size(), lambda: tensor)


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8),
        st.tuples(shapes, st.sampled_from(sorted(DTYPES))),
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_the_official_library_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, spec: dict[str, tuple[list[int], str]]
) -> None:
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    spec.pop("__metadata__", None)
    tensors = {key: torch.randint(0, 2, size).to(DTYPES[dtype]) for key, (size, dtype) in spec.items()}
    info = write_safetensors(path, [entry(key, tensor) for key, tensor in tensors.items()])
    verify_file(path, info)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert loaded[key].dtype == tensor.dtype
        assert torch.equal(loaded[key], tensor)


def test_strided_views_and_tensors_that_share_memory_are_written_as_they_look(tmp_path: Path) -> None:
    table = torch.arange(24.0).view(4, 6)
    views = {"columns": table[:, 2:5], "turned": table.t(), "rows": table[1:3], "one": table[3, 5]}
    write_safetensors(tmp_path / "x.safetensors", [entry(key, view) for key, view in views.items()])
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[key], view) for key, view in views.items())


def test_values_are_fetched_one_at_a_time_when_their_turn_comes(tmp_path: Path) -> None:
    alive, most = 0, 0

    class Counted:
        def __call__(self) -> torch.Tensor:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            tensor = torch.zeros(1000)
            weakref.finalize(tensor, self.release)
            return tensor

        def release(self) -> None:
            nonlocal alive
            alive -= 1

    write_safetensors(tmp_path / "x.safetensors", [Entry(str(i), torch.float32, torch.Size([1000]), Counted()) for i in range(9)])
    assert most <= 2


def test_a_dtype_the_format_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"moments: cannot save dtype torch.complex64"):
        write_safetensors(tmp_path / "x.safetensors", [entry("moments", torch.zeros(2, dtype=torch.complex64))])


def test_a_disk_that_refuses_is_an_error_with_the_path() -> None:
    with pytest.raises(CheckpointError, match=r"cannot write /dev/full: No space left on device"):
        write_safetensors(Path("/dev/full"), [entry("x", torch.zeros(100_000))])


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_changed_cut_or_added_byte_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    info = write_safetensors(path, [entry("x", torch.arange(50))])
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "add"]))
    if kind == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[at:]
    else:
        content.insert(at, 0)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        verify_file(path, info)


def test_missing_files_links_and_folders_are_no_files(tmp_path: Path) -> None:
    info = write_safetensors(tmp_path / "x.safetensors", [entry("x", torch.zeros(1))])
    (tmp_path / "link").symlink_to(tmp_path / "x.safetensors")
    for name in ("nothing", "link", "."):
        with pytest.raises(CheckpointError, match="missing or no regular file"):
            verify_file(tmp_path / name, info)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "x.pkl", "x.safetensors\n", ".x.safetensors"]
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="expected a plain name"):
        check_file_name(name, Path("manifest.json"))
