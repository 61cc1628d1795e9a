"""The safetensors that an export writes: the library's, byte for byte, in any order of writing."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from recipe.export import SafetensorsWriter, run_begins


def some_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"a.weight": (3, 5), "b.weight": (7,), "c": (), "d.weight": (0, 3), "e.weight": (40, 50)}
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def writer(
    folder: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32, size: str = "5GB"
) -> SafetensorsWriter:
    return SafetensorsWriter(folder, {name: tensor.shape for name, tensor in tensors.items()}, dtype, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_the_file_is_the_librarys_byte_for_byte_in_any_order_of_writing(seed, dtype, tmp_path):
    tensors = some_tensors(dtype)
    save_file(tensors, tmp_path / "library.safetensors", metadata={"format": "pt"})
    with writer(tmp_path, tensors, dtype) as out:
        for name in random.Random(seed).sample(sorted(tensors), len(tensors)):
            out.write(name, tensors[name])
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "library.safetensors").read_bytes()
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_tensors_are_cast_and_made_contiguous(tmp_path):
    tensors = {"a": torch.randn(4, 6).T, "b": torch.randn(8, 8)[::2, 1:], "c": torch.randn(3, requires_grad=True)}
    with writer(tmp_path, tensors, torch.bfloat16) as out:
        for name, tensor in tensors.items():
            out.write(name, tensor)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], tensor.detach().bfloat16())


def test_the_order_in_the_model_need_not_be_the_alphabets(tmp_path):
    tensors = dict(reversed(some_tensors().items()))
    with writer(tmp_path, tensors) as out:
        for name, tensor in sorted(tensors.items()):
            out.write(name, tensor)
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_is_copied_before_numpy_sees_it(tmp_path):
    """FSDP frees a gathered unit by resizing its storage, which must stay possible."""
    tensor = torch.randn(4)
    with writer(tmp_path, {"a": tensor}) as out:
        out.write("a", tensor)
    tensor.untyped_storage().resize_(0)


def test_shards_are_at_most_as_large_as_asked(tmp_path):
    tensors = {f"{i:02}": torch.randn(100) for i in range(10)}
    with writer(tmp_path, tensors, size="1KB") as out:
        for name, tensor in reversed(tensors.items()):
            out.write(name, tensor)
    names = [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == names
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4000
    assert index["weight_map"].keys() == tensors.keys()
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensors[name])
            assert sum(opened.get_tensor(key).nbytes for key in opened.keys()) <= 1000


def test_a_tensor_that_was_not_announced(tmp_path):
    with pytest.raises(KeyError, match="z.weight"), writer(tmp_path, some_tensors()) as out:
        out.write("z.weight", torch.zeros(3))


def test_a_tensor_that_comes_twice(tmp_path):
    with pytest.raises(KeyError, match="a.weight"), writer(tmp_path, some_tensors()) as out:
        out.write("a.weight", torch.zeros(3, 5))
        out.write("a.weight", torch.zeros(3, 5))


def test_tensors_lie_in_the_order_of_their_names_with_numbers_by_value(tmp_path):
    """However they were announced: so the export of a checkpoint, which knows no model, is the run's."""
    names = ["lm_head.weight", "model.layers.10.norm.weight", "model.layers.9.norm.weight", "model.norm.weight"]
    with writer(tmp_path, {name: torch.zeros(3) for name in names}) as out:
        assert out.missing == [names[i] for i in (0, 2, 1, 3)]
        for name in names:
            out.write(name, torch.zeros(3))
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.offset_keys() == [names[i] for i in (0, 2, 1, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_a_tensor_may_come_in_parts(seed, dtype, tmp_path):
    """Rectangles of any kind: rows, columns, blocks; in any order, and other tensors' in between."""
    tensors = some_tensors() | {"f": torch.randn(4, 6, 5, 3)}
    draw = random.Random(seed)
    parts = [(name, tensor, (0,) * tensor.dim()) for name, tensor in tensors.items()]
    for _ in range(4):
        parts = [half for part in parts for half in halves(*part, draw)]
    draw.shuffle(parts)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, tmp_path / "library.safetensors")
    with writer(tmp_path, tensors, dtype) as out:
        for name, part, offsets in parts:
            out.write(name, part, offsets)
    found, expected = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "library.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in tensors)


def halves(name: str, part: torch.Tensor, offsets: tuple[int, ...], draw: random.Random) -> Iterator[tuple]:
    wide = [dim for dim, size in enumerate(part.shape) if size > 1]
    if not wide or not part.numel():
        yield name, part, offsets
        return
    dim = draw.choice(wide)
    first = draw.randrange(1, part.shape[dim])
    yield name, part.narrow(dim, 0, first), offsets
    moved = tuple(offset + first * (d == dim) for d, offset in enumerate(offsets))
    yield name, part.narrow(dim, first, part.shape[dim] - first), moved


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes", "begins"),
    [
        ((), (), (), [0]),
        ((7,), (2,), (3,), [2]),
        ((4, 5), (1, 0), (2, 5), [5]),
        ((4, 5), (1, 2), (2, 2), [7, 12]),
        ((4, 5), (1, 2), (1, 2), [7]),
        ((2, 3, 4), (0, 1, 0), (2, 2, 4), [4, 16]),
        ((2, 3, 4), (0, 0, 1), (2, 1, 3), [1, 13]),
    ],
)
def test_runs_of_a_rectangle(shape, offsets, sizes, begins):
    assert run_begins(shape, offsets, sizes) == begins


@pytest.mark.parametrize("shape", [(5, 3), (15,), (3, 4), ()])
def test_a_tensor_of_another_shape(shape, tmp_path):
    """Also where the number of bytes would be the same: a flat parameter, a shard."""
    with (
        pytest.raises(ValueError, match="a.weight is .* and was announced as \\[3, 5\\]"),
        writer(tmp_path, some_tensors()) as out,
    ):
        out.write("a.weight", torch.zeros(shape))


def test_tensors_that_never_came(tmp_path):
    with (
        pytest.raises(ValueError, match="2 tensors were never written: b.weight, e.weight"),
        writer(tmp_path, some_tensors()) as out,
    ):
        out.write("e.weight", torch.zeros(39, 50), (0, 0))  # all but a row
        for name, tensor in some_tensors().items():
            if name not in ("b.weight", "e.weight"):
                out.write(name, tensor)
    assert all(file.raw.closed for file in out._files.values())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors.part"]


def test_an_error_on_the_way_is_not_hidden_by_what_is_missing(tmp_path):
    with pytest.raises(OSError, match="No space"), writer(tmp_path, some_tensors()) as out:
        raise OSError("No space left on device")
    assert all(file.raw.closed for file in out._files.values())


def test_a_file_has_its_name_once_it_is_complete_and_is_not_written_again(tmp_path):
    tensors = {f"{i}": torch.randn(100) for i in range(6)}
    with pytest.raises(KeyboardInterrupt), writer(tmp_path, tensors, size="1KB") as out:  # two tensors a file
        for name in ("2", "0", "3", "4"):
            out.write(name, tensors[name])
        raise KeyboardInterrupt
    done = tmp_path / "model-00002-of-00003.safetensors"
    assert [path.name for path in tmp_path.glob("*.safetensors")] == [done.name]
    before = done.stat()
    with writer(tmp_path, tensors, size="1KB") as out:
        assert out.missing == ["0", "1", "4", "5"]
        for name in out.missing:
            out.write(name, tensors[name])
    after = done.stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert len(list(tmp_path.iterdir())) == 4, "no part is left"
