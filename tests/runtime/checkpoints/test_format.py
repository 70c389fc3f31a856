"""One checkpoint in a folder: what is written is what is read, and what was changed in between is refused."""

from __future__ import annotations

import collections
import errno
import itertools
import json
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lowtide.errors import CheckpointError, CheckpointWriteError, ConfigError, DamagedCheckpointError
from lowtide.plain_text import Plain
from lowtide.runtime.checkpoints import blocks, layout
from lowtide.runtime.checkpoints.blocks import PAGE_BYTES, WRITE_BYTES, combined
from lowtide.runtime.checkpoints.disk import Disk
from lowtide.runtime.checkpoints.format import CheckpointReader, CheckpointWriter, TensorSpec
from lowtide.runtime.checkpoints.layout import DTYPES
from lowtide.runtime.checkpoints.snapshot import Snapshot, Source
from tests.runtime.checkpoints.power_cut import QuickDisk

Files = Mapping[str, Mapping[str, torch.Tensor]]
STATE: dict[str, Plain] = {"epoch": 3, "best": float("inf"), "rates": [1e-3, 0.1], "note": "ä\ud800", "none": None}


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    values = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    if dtype is torch.bool:
        values %= 2
    return values.view(dtype).reshape(shape)


def of_every_dtype() -> dict[str, torch.Tensor]:
    tensors = {f"{code}.weight": random_tensor(dtype, 3, 5) for code, dtype in DTYPES.items()}
    return tensors | {
        "zero_dim": torch.tensor(2.5),
        "empty": torch.empty(0, 7, dtype=torch.bfloat16),
        "large": random_tensor(torch.bfloat16, 1_500_001),
    }


def specs_of(files: Files) -> dict[str, dict[str, TensorSpec]]:
    return {file: {name: TensorSpec.of(value) for name, value in tensors.items()} for file, tensors in files.items()}


def write(folder: Path, files: Files, *, step: int = 120, max_file_bytes: int = 1 << 30, **texts: str) -> None:
    with CheckpointWriter(folder, specs_of(files), max_file_bytes=max_file_bytes) as writer:
        for file, tensors in files.items():
            for name, value in tensors.items():
                writer.write(file, name, value)
        for name, text in texts.items():
            writer.add_file(f"{name}.json", text)
        writer.finish(step=step, state=STATE)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other)))
    )


def test_what_is_written_is_read_to_the_bit(tmp_path: Path) -> None:
    files = {"model": of_every_dtype(), "optimizer": {"exp_avg.0": torch.randn(40, 3)}, "state": {}}
    write(tmp_path, files, config='{"model_type": "gpt2"}')
    reader = CheckpointReader(tmp_path)
    reader.verify()
    assert (reader.index.step, reader.index.state) == (120, STATE)
    assert reader.text("config.json") == '{"model_type": "gpt2"}'
    for file, tensors in files.items():
        assert reader.names(file) == specs_of(files)[file]
        for name, value in tensors.items():
            assert same_bits(reader.read(file, name), value)
    assert reader.index.num_bytes == sum(f.stat().st_size for f in tmp_path.iterdir() if f.name != "checkpoint.json")
    assert reader.index.file_names == {f.name for f in tmp_path.iterdir()}


def test_the_safetensors_library_reads_the_same(tmp_path: Path) -> None:
    tensors = of_every_dtype()
    write(tmp_path, {"model": tensors})
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], tensors[name]) for name in tensors)
    with safe_open(str(tmp_path / "model.safetensors"), framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_reading_into_a_tensor(tmp_path: Path) -> None:
    value = torch.randn(50, 30)
    write(tmp_path, {"model": {"weight": value}})
    reader = CheckpointReader(tmp_path)
    parameter = torch.nn.Parameter(torch.zeros(50, 30))
    turned = torch.zeros(30, 50).t()
    for into in (parameter, turned):
        assert reader.read("model", "weight", into) is into
        assert torch.equal(into, value)
    with pytest.raises(
        CheckpointError, match=r"'weight' of model is \[50, 30\] in torch.float32, .* \[50, 30\] in torch.bf"
    ):
        reader.read("model", "weight", torch.zeros(50, 30, dtype=torch.bfloat16))


def test_pieces_from_many_threads_in_any_order(tmp_path: Path) -> None:
    value = random_tensor(torch.int16, 1000, 33)
    flat = value.reshape(-1)
    cuts = [0, 1, 7, 4000, 4001, 20_000, 33_000]
    pieces = [(begin, flat[begin:end]) for begin, end in itertools.pairwise(cuts)]
    with CheckpointWriter(tmp_path, specs_of({"model": {"weight": value}})) as writer:
        threads = [
            threading.Thread(target=writer.write, args=("model", "weight", piece), kwargs={"start": begin})
            for begin, piece in reversed(pieces)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        index = writer.finish(step=1, state={})
    assert index.checksums["model"]["weight"] == zlib.crc32(value.numpy())
    assert torch.equal(CheckpointReader(tmp_path).read("model", "weight"), value)


def test_checksums_of_pieces_give_that_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        data = bytes(
            torch.randint(0, 256, (int(torch.randint(0, 3000, (), generator=generator)),), generator=generator)
        )
        cuts = sorted(int(cut) for cut in torch.randint(0, len(data) + 1, (4,), generator=generator))
        parts = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert combined((len(part), zlib.crc32(part)) for part in parts) == zlib.crc32(data)


def test_a_large_section_is_split_as_hugging_face_does(tmp_path: Path) -> None:
    tensors = {f"layers.{number}.weight": torch.randn(10, 10) for number in range(7)}
    tensors["layers.3.weight"] = torch.randn(50, 10)
    write(tmp_path, {"model": tensors}, max_file_bytes=900)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names == [f"model-{number:05d}-of-00005.safetensors" for number in range(1, 6)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 6 * 400 + 2000}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
    assert index["weight_map"].keys() == tensors.keys()
    CheckpointReader(tmp_path).verify()


def test_the_files_have_their_length_from_the_start(tmp_path: Path) -> None:
    value = torch.randn(1000, 1000)
    with CheckpointWriter(tmp_path, specs_of({"model": {"weight": value}})) as writer:
        found = (tmp_path / "model.safetensors").stat()
        assert found.st_size == writer.num_bytes > 4_000_000
        assert found.st_blocks * 512 >= 4_000_000, "the disk has set the room aside"
    assert not (tmp_path / "checkpoint.json").exists()


@pytest.mark.parametrize(
    ("value", "start", "text"),
    [
        (
            torch.zeros(3, 2),
            None,
            r"announced as \[2, 3\] in torch.float32 and given as \[3, 2\] in torch.float32; save",
        ),
        (torch.zeros(2, 3).half(), None, r"given as \[2, 3\] in torch.float16"),
        (torch.zeros(3), 4, r"given as \[3\] in torch.float32, as a piece from element 4"),
        (torch.zeros(3, 2).t(), None, r"stride \(1, 2\) cannot be saved as it is; give a contiguous copy on the host"),
        (torch.zeros(2, 3, device="meta"), None, "a tensor on meta"),
    ],
)
def test_what_was_not_announced_is_refused(tmp_path: Path, value: torch.Tensor, start: int | None, text: str) -> None:
    with CheckpointWriter(tmp_path, specs_of({"model": {"weight": torch.zeros(2, 3)}})) as writer:
        with pytest.raises(CheckpointError, match=text):
            writer.write("model", "weight", value, start=start)
        with pytest.raises(CheckpointError, match="no tensor 'bias' of model was announced"):
            writer.write("model", "bias", value)


def test_a_checkpoint_with_a_hole_is_not_finished(tmp_path: Path) -> None:
    specs = specs_of({"model": {"weight": torch.zeros(8)}})
    with CheckpointWriter(tmp_path, specs) as writer:
        writer.write("model", "weight", torch.ones(3), start=0)
        writer.write("model", "weight", torch.ones(3), start=4)
        with pytest.raises(
            CheckpointError, match="'weight' of model is not whole: its first 12 of 32 bytes are written"
        ):
            writer.finish(step=1, state={})
        with pytest.raises(CheckpointWriteError, match="cannot be written any more: .* begin a new save"):
            writer.write("model", "weight", torch.ones(1), start=3)
    with pytest.raises(DamagedCheckpointError, match="checkpoint.json in .* cannot be used: it is missing"):
        CheckpointReader(tmp_path)


def test_a_tensor_is_written_once(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, specs_of({"model": {"weight": torch.zeros(8)}})) as writer:
        writer.write("model", "weight", torch.ones(8))
        with pytest.raises(CheckpointError, match="element 0 of 'weight' of model is written twice; write it once"):
            writer.write("model", "weight", torch.ones(8))


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"betas": (0.9, 0.95)}, r"state\['betas'\] is a tuple; a checkpoint's state is made of dicts"),
        ({"rates": [1.0, torch.tensor(1.0)]}, r"state\['rates'\]\[1\] is a Tensor"),
        ({"groups": {0: 1.0}}, r"state\['groups'\] has the key 0; keys of a checkpoint's state are text"),
        ({"history": collections.OrderedDict(a=1)}, r"state\['history'\] is a OrderedDict"),
        (
            {"deep": json.loads("[" * 200 + "]" * 200)},
            r"state\['deep'\].* is nested more than 100 deep; save it flatter",
        ),
    ],
)
def test_state_that_json_would_change_is_refused(tmp_path: Path, state: dict[str, Plain], text: str) -> None:
    with CheckpointWriter(tmp_path, {}) as writer, pytest.raises(ConfigError, match=text):
        writer.finish(step=1, state=state)


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", ".lock", "checkpoint.json", "model.safetensors", ""])
def test_names_that_are_no_plain_names_are_refused(tmp_path: Path, name: str) -> None:
    with (
        CheckpointWriter(tmp_path, {}) as writer,
        pytest.raises(ConfigError, match="cannot name a file of a checkpoint"),
    ):
        writer.add_file(name, "")


def test_names_that_are_taken_are_refused(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, {}) as writer:
        writer.add_file("config.json", "{}")
        for name in ("config.json", "model.safetensors.index.json"):
            with pytest.raises(
                ConfigError, match=f"the name '{name}' is taken; give each file of a checkpoint a name of its"
            ):
                writer.add_file(name, "{}")


@pytest.mark.parametrize("step", [-1, True, 1.0, torch.tensor(3)])
def test_a_step_that_is_no_whole_number_is_refused(tmp_path: Path, step: int) -> None:
    with (
        CheckpointWriter(tmp_path, {}) as writer,
        pytest.raises(ConfigError, match="step is .*; give a whole number from 0"),
    ):
        writer.finish(step=step, state={})


def test_sections_and_tensors_that_files_cannot_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'../model' cannot name a file of tensors"):
        CheckpointWriter(tmp_path, {"../model": {}})
    with pytest.raises(ConfigError, match="a tensor cannot be named '__metadata__'"):
        CheckpointWriter(tmp_path, specs_of({"model": {"__metadata__": torch.zeros(1)}}))
    with pytest.raises(ConfigError, match="safetensors files have no torch.complex128"):
        TensorSpec(dtype=torch.complex128, shape=())
    with pytest.raises(ConfigError, match=r"no tensor can have the shape \[0, 1180591620717411303424\]"):
        TensorSpec(dtype=torch.uint8, shape=(0, 2**70))


def test_a_header_that_the_library_would_not_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_MOST_HEADER_BYTES", 100)
    expected = (
        r"model.safetensors would have 2 tensors and a header of \d+ bytes; .* reads 100 at most: give it a smaller"
    )
    with pytest.raises(ConfigError, match=expected):
        CheckpointWriter(tmp_path, specs_of({"model": {"one": torch.zeros(1), "two": torch.zeros(1)}}))


def test_what_is_not_there_is_named_with_what_is_near(tmp_path: Path) -> None:
    write(tmp_path, {"model": {"head.weight": torch.zeros(1)}})
    reader = CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match="has no tensor 'heads.weight'; did you mean 'head.weight'"):
        reader.read("model", "heads.weight")
    with pytest.raises(CheckpointError, match="has no section 'modle'; did you mean 'model'"):
        reader.names("modle")
    with pytest.raises(CheckpointError, match="has no file 'config.json'"):
        reader.text("config.json")


def test_reading_from_many_threads(tmp_path: Path) -> None:
    tensors = {f"layers.{number}": torch.randn(300, 70) for number in range(40)}
    write(tmp_path, {"model": tensors}, max_file_bytes=300_000)
    reader = CheckpointReader(tmp_path)
    with ThreadPoolExecutor(6) as pool:
        values = list(pool.map(lambda name: reader.read("model", name), tensors))
    assert all(torch.equal(value, tensors[name]) for name, value in zip(tensors, values, strict=True))


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 10])
def test_what_goes_to_a_device_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(blocks, "_STAGED_BYTES", 16)
    saved, read = torch.randn(count), torch.zeros(count)
    (tmp_path / "file").write_bytes(b"header" + saved.numpy().tobytes())
    with (tmp_path / "file").open("rb") as file:
        assert blocks.read_in_blocks(file.fileno(), read, 6) == zlib.crc32(saved.numpy())
    assert torch.equal(read, saved)


@pytest.mark.gpu
def test_reading_into_a_tensor_on_the_device(tmp_path: Path) -> None:
    value = torch.randn(5_000_001)
    write(tmp_path, {"model": {"weight": value, "turned": value[:20].reshape(4, 5)}})
    reader = CheckpointReader(tmp_path)
    into = torch.zeros(5_000_001, device="cuda")
    assert reader.read("model", "weight", into) is into
    assert torch.equal(into.cpu(), value)
    turned = torch.zeros(5, 4, device="cuda").t()
    assert torch.equal(reader.read("model", "turned", turned).cpu(), value[:20].reshape(4, 5))


class SlowDisk(QuickDisk):
    """Waits in the first large write until it is let go, and notes what is written to closed files."""

    def __init__(self) -> None:
        self.is_writing, self.may_go_on = threading.Event(), threading.Event()
        self.closed: set[int] = set()
        self.num_late = 0

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        if len(data) == WRITE_BYTES:
            self.is_writing.set()
            assert self.may_go_on.wait(30)
            self.num_late += descriptor in self.closed
        return super().write(descriptor, data, offset)

    def close(self, descriptor: int) -> None:
        self.closed.add(descriptor)
        super().close(descriptor)


def test_closing_waits_for_writes_under_way(tmp_path: Path) -> None:
    """A descriptor that is closed meanwhile could be another file's by the thread's next write."""
    disk, value = SlowDisk(), torch.zeros(2 * WRITE_BYTES, dtype=torch.uint8)
    writer = CheckpointWriter(tmp_path, specs_of({"model": {"weight": value}}), disk=disk)
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(writer.write, "model", "weight", value)
        assert disk.is_writing.wait(30)
        closing = pool.submit(writer.close)
        assert not closing.done()
        disk.may_go_on.set()
        closing.result(30)
        with pytest.raises(
            CheckpointWriteError, match="cannot be written any more: its writer is closed; begin a new save"
        ):
            writing.result(30)
    assert len(disk.closed) in (1, 2), "the file, and once more for writes past the page cache"
    assert disk.num_late == 0


class DirectDisk(QuickDisk):
    """Notes which bytes went past the page cache and which through it. It may refuse the former, or take a part."""

    def __init__(self, answer: Callable[[memoryview], int] = len) -> None:
        self.direct: set[int] = set()
        self.pages: dict[bool, set[tuple[str, int]]] = {True: set(), False: set()}
        """The file and the number of each page, by whether it went past the page cache."""
        self._answer = answer

    def open_direct(self, path: Path) -> int | None:
        # As every disk does it: the bytes are the same, and not every file system of a test has the real thing.
        self.direct.add(descriptor := os.open(path, os.O_WRONLY))
        return descriptor

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        if descriptor in self.direct:
            address = np.frombuffer(data, dtype=np.uint8).ctypes.data
            assert [address % PAGE_BYTES, offset % PAGE_BYTES, len(data) % PAGE_BYTES] == [0, 0, 0]
            data = data[: self._answer(data)]
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        pages = range(offset // PAGE_BYTES, -(-(offset + len(data)) // PAGE_BYTES))
        self.pages[descriptor in self.direct] |= {(name, page) for page in pages}
        return super().write(descriptor, data, offset)


def refuse(data: memoryview) -> int:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def fill_up(data: memoryview) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_by_slabs(folder: Path, disk: Disk) -> tuple[Files, BaseException | None]:
    """Large tensors between small ones, and what became of their save."""
    sizes = {"a": 5_000_017, "b": 33, "c": 40_000_003, "d": 7, "e": 1 << 22, "f": 4096}
    files = {"model": {name: random_tensor(torch.uint8, size) for name, size in sizes.items()}}
    shards = layout.shards_of("model", specs_of(files)["model"])
    sources = [
        Source(file="model", name=name, tensor=value, offset=shards[0].places[name].offset)
        for name, value in files["model"].items()
    ]
    room_bytes = sum(source.room_bytes(source.tensor.nbytes) for source in sources)
    snapshot = Snapshot(sources, allowance_bytes=room_bytes)
    snapshot.read()
    assert snapshot.is_over, "with room for all of it nothing waits for the disk"
    with CheckpointWriter(folder, specs_of(files), disk=disk) as writer:
        snapshot.write(writer)
        if snapshot.error is None:
            writer.finish(step=3, state={})
    error = snapshot.error
    snapshot.release()
    return files, error


@pytest.mark.parametrize("disk", [DirectDisk(), DirectDisk(refuse), DirectDisk(lambda data: len(data) // 3), Disk()])
def test_large_tensors_go_past_the_page_cache_where_the_disk_lets_them(tmp_path: Path, disk: Disk) -> None:
    files, error = save_by_slabs(tmp_path, disk)
    assert error is None
    CheckpointReader(tmp_path).verify()
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in files["model"].items())


def test_no_page_of_a_file_is_written_both_ways(tmp_path: Path) -> None:
    disk = DirectDisk()
    save_by_slabs(tmp_path, disk)
    assert not disk.pages[True] & disk.pages[False]
    assert len(disk.pages[True]) * PAGE_BYTES > 0.999 * (5_000_017 + 40_000_003 + (1 << 22))


def test_a_disk_that_is_full_for_what_goes_past_the_page_cache(tmp_path: Path) -> None:
    _, error = save_by_slabs(tmp_path, DirectDisk(fill_up))
    assert isinstance(error, CheckpointWriteError)
    assert "cannot write model.safetensors" in str(error) or "No space left on device" in str(error)
    assert not (tmp_path / "checkpoint.json").exists()


def test_reading_holds_no_second_copy(tmp_path: Path) -> None:
    """The peak of Python's and torch's memory is the tensor and a block; measured by the process, in one of its own."""
    write(tmp_path, {"model": {"weight": random_tensor(torch.uint8, 64 << 20)}})
    script = (
        "import resource, sys, pathlib, torch\n"
        "from lowtide.runtime.checkpoints.format import CheckpointReader\n"
        "reader = CheckpointReader(pathlib.Path(sys.argv[1]))\n"
        "into = torch.zeros(64 << 20, dtype=torch.uint8)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "reader.read('model', 'weight', into); reader.verify()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(run.stdout) * 1024 < 16 << 20
