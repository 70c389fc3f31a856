"""Damaged, foreign and hostile checkpoints: each is refused by name, and none is read as another one."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.errors import CheckpointError, DamagedCheckpointError
from lowtide.runtime.checkpoints.format import CheckpointReader, TensorSpec
from lowtide.runtime.checkpoints.layout import laid_out
from tests.runtime.checkpoints.power_cut import QuickDisk
from tests.runtime.checkpoints.saves import what_is_in, write

FILES = (
    "checkpoint.json",
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "optimizer.safetensors",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "step-00000010"
    path.mkdir()
    write(path, 10, disk=QuickDisk())
    assert tuple(sorted(file.name for file in path.iterdir())) == FILES
    return path


@pytest.fixture
def checkpoint(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "step-00000010"))


def read_all(folder: Path) -> None:
    """Either every value is as it was saved, or the checkpoint is refused."""
    reader = CheckpointReader(folder)
    reader.verify()
    assert what_is_in(reader) == (10, 0)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused(checkpoint: Path, name: str, where: float, bit: int) -> None:
    file = checkpoint / name
    before = file.read_bytes()
    after = bytearray(before)
    after[int(where * len(before))] ^= 1 << bit
    file.write_bytes(after)
    try:
        with pytest.raises(DamagedCheckpointError, match="step-00000010/") as caught:
            read_all(checkpoint)
        assert caught.value.file == f"step-00000010/{name}"
    finally:
        file.write_bytes(before)


def test_every_flipped_bit_of_the_index_is_refused(checkpoint: Path) -> None:
    file = checkpoint / "checkpoint.json"
    before = file.read_bytes()
    for position in range(len(before)):
        for bit in range(8):
            after = bytearray(before)
            after[position] ^= 1 << bit
            file.write_bytes(after)
            with pytest.raises(DamagedCheckpointError, match="step-00000010/checkpoint.json in"):
                CheckpointReader(checkpoint)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), length=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_is_refused(checkpoint: Path, name: str, length: float) -> None:
    file = checkpoint / name
    before = file.read_bytes()
    file.write_bytes(before[: int(length * len(before))])
    try:
        with pytest.raises(DamagedCheckpointError, match=re.escape(f"step-00000010/{name} in")):
            read_all(checkpoint)
    finally:
        file.write_bytes(before)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), start=st.floats(0, 1), data=st.binary(min_size=1, max_size=200))
def test_a_file_that_is_overwritten_is_refused(checkpoint: Path, name: str, start: float, data: bytes) -> None:
    file = checkpoint / name
    before = file.read_bytes()
    begin = int(start * len(before))
    after = before[:begin] + data + before[begin + len(data) :]
    file.write_bytes(after)
    try:
        if after == before:
            read_all(checkpoint)
        else:
            with pytest.raises(DamagedCheckpointError):
                read_all(checkpoint)
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    text = rf"step-00000010/{re.escape(name)} in .* cannot be used: it is missing. Load another checkpoint, or copy the file"
    with pytest.raises(DamagedCheckpointError, match=text):
        CheckpointReader(checkpoint)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path, other: path.symlink_to(other), "it is a link, and may point anywhere"),
        (lambda path, other: path.mkdir(), "it is no ordinary file"),
        (lambda path, other: os.mkfifo(path), "it is no ordinary file"),
    ],
    ids=["link", "folder", "pipe"],
)
def test_what_is_no_file_is_refused(
    checkpoint: Path, whole: Path, name: str, make: Callable[[Path, Path], None], text: str
) -> None:
    (checkpoint / name).unlink()
    make(checkpoint / name, whole / name)
    with pytest.raises(DamagedCheckpointError, match=rf"{re.escape(name)} in .*{text}"):
        CheckpointReader(checkpoint)


def test_files_of_another_save_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """The other's are whole, and have the same lengths and headers."""
    other = tmp_path / "step-00000011"
    other.mkdir()
    write(other, 11, disk=QuickDisk())
    for name in FILES[2:4]:
        before = (checkpoint / name).read_bytes()
        shutil.copy(other / name, checkpoint / name)
        with pytest.raises(
            DamagedCheckpointError, match=rf"{name} in .* the bytes of '.*' are not those that were saved"
        ):
            read_all(checkpoint)
        (checkpoint / name).write_bytes(before)
    read_all(checkpoint)


def test_a_header_that_another_tool_has_written_is_refused(checkpoint: Path) -> None:
    file = checkpoint / "optimizer.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"format":"pt"', b'"format":"tf"'))
    with pytest.raises(
        DamagedCheckpointError, match="optimizer.safetensors in .* its header is not the one that was saved"
    ):
        CheckpointReader(checkpoint)


def with_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the index and give it a checksum that fits, as somebody would who means harm."""
    file = folder / "checkpoint.json"
    plain = json.loads(file.read_bytes())
    change(plain)
    del plain["crc32"]
    body = json.dumps(plain, indent=1).removesuffix("\n}").encode()
    file.write_bytes(body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode())


def model_file(plain: dict[str, Any]) -> dict[str, Any]:
    file = plain["files"]["model"][0]
    assert isinstance(file, dict)
    return file


def tensor(plain: dict[str, Any]) -> dict[str, Any]:
    entry = model_file(plain)["tensors"]["embedding.weight"]
    assert isinstance(entry, dict)
    return entry


def test_the_index_may_be_signed_anew(checkpoint: Path) -> None:
    """So that the tests below are refused for what they change."""
    with_index(checkpoint, lambda plain: None)
    read_all(checkpoint)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda plain: plain.update(schema="lowtide.checkpoint/2"),
            "its schema is 'lowtide.checkpoint/2', and this Lowtide",
        ),
        (lambda plain: plain.pop("schema"), "its schema is None, and this Lowtide reads 'lowtide.checkpoint/1'"),
        (lambda plain: plain.update(step=-1), "-1 is no whole number from 0 on"),
        (lambda plain: plain.update(step=True), "True is no whole number"),
        (lambda plain: plain.update(state=[1]), r"\[1\] is no object"),
        (lambda plain: plain.pop("files"), "KeyError: 'files'"),
        (
            lambda plain: plain["files"].update({"../../model": plain["files"].pop("model")}),
            "cannot name a file of tensors",
        ),
        (
            lambda plain: model_file(plain).update(name="../step-00000011/model.safetensors"),
            "cannot be file 1 of 2 of model",
        ),
        (lambda plain: model_file(plain).update(name="/etc/passwd"), "'/etc/passwd' cannot be file 1 of 2 of model"),
        (lambda plain: model_file(plain).update(bytes=2**62), "cannot be file 1 of 2 of model"),
        (lambda plain: plain["texts"].update({"../x": {"bytes": 1, "crc32": "00000000"}}), "'../x' cannot name a file"),
        (
            lambda plain: plain["texts"].update({"checkpoint.json": {"bytes": 1, "crc32": "00000000"}}),
            "cannot name a file",
        ),
        (lambda plain: tensor(plain).update(dtype="F999"), "KeyError: 'F999'"),
        (lambda plain: tensor(plain).update(dtype=["F32"]), "it describes what cannot be"),
        (lambda plain: tensor(plain).update(shape=[-20, -8]), "-20 is no whole number"),
        (lambda plain: tensor(plain).update(shape=[2**62, 4]), "no tensor can have the shape"),
        (lambda plain: tensor(plain).update(shape=[0, 2**70], bytes=0), "no tensor can have the shape"),
        (lambda plain: tensor(plain).update(shape=[20, 8.0]), "8.0 is no whole number"),
        (lambda plain: tensor(plain).update(shape="20"), "'20' is no list"),
        (lambda plain: tensor(plain).update(shape=[20, 9]), r"\[20, 9\] in BF16 has 360 bytes, not 320"),
        (lambda plain: tensor(plain).update(crc32="FFFFFFFF"), "no CRC-32 in eight hexadecimal digits"),
        (lambda plain: tensor(plain).pop("crc32"), "KeyError: 'crc32'"),
        (
            lambda plain: plain["files"]["model"][1]["tensors"].update(model_file(plain)["tensors"]),
            "is in two files of model",
        ),
    ],
)
def test_an_index_that_describes_what_cannot_be_is_refused(
    checkpoint: Path, change: Callable[[dict[str, Any]], object], text: str
) -> None:
    with_index(checkpoint, change)
    with pytest.raises(DamagedCheckpointError, match=rf"step-00000010/checkpoint.json in .* cannot be used: .*{text}"):
        CheckpointReader(checkpoint)


def test_a_tensor_larger_than_its_file_is_refused_before_it_has_memory(checkpoint: Path) -> None:
    huge = TensorSpec(dtype=torch.uint8, shape=(10**15,))

    def change(plain: dict[str, Any]) -> None:
        (file,) = plain["files"]["optimizer"]
        (entry,) = file["tensors"].values()
        entry.update(shape=[10**15], bytes=10**15)
        file["bytes"] = laid_out("optimizer.safetensors", {"exp_avg.0": huge}).num_bytes

    with_index(checkpoint, change)
    with pytest.raises(
        DamagedCheckpointError, match=r"optimizer.safetensors in .* it has \d+ bytes of 1,000,000,000,000,\d+"
    ):
        CheckpointReader(checkpoint)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "it is not whole"),
        (b"[1, 2]", "it is JSON, but no index of a checkpoint"),
        (b'{"schema": "lowtide.checkpoint/1"}', "its checksum does not fit its text"),
        (b"\xff\xfe\x00", "it is not whole: 'utf-8' codec"),
        (b"[" * 100_000, "it is not whole"),
        (b'{"model_type": "gpt2"}', "its schema is None"),
    ],
)
def test_a_foreign_index_is_refused(checkpoint: Path, text: bytes, expected: str) -> None:
    (checkpoint / "checkpoint.json").write_bytes(text)
    with pytest.raises(DamagedCheckpointError, match=f"checkpoint.json in .* cannot be used: {expected}"):
        CheckpointReader(checkpoint)


def test_an_index_of_absurd_size_is_not_read(checkpoint: Path) -> None:
    os.truncate(checkpoint / "checkpoint.json", 1 << 42)
    with pytest.raises(
        DamagedCheckpointError, match="it has 4,398,046,511,104 bytes, which none that Lowtide writes has"
    ):
        CheckpointReader(checkpoint)


def test_a_file_that_is_damaged_after_opening_is_refused(checkpoint: Path) -> None:
    reader = CheckpointReader(checkpoint)
    (checkpoint / "config.json").write_text('{"step": 11}')
    with pytest.raises(DamagedCheckpointError, match="config.json in .* its bytes are not those that were saved"):
        reader.text("config.json")
    (checkpoint / "optimizer.safetensors").unlink()
    with pytest.raises(DamagedCheckpointError, match="optimizer.safetensors in .* it is missing"):
        reader.read("optimizer", "exp_avg.0")
    with pytest.raises(CheckpointError):
        reader.verify()


def test_nothing_that_is_loaded_can_run_code() -> None:
    """Nothing here imports what unpickles or evaluates; what torch has written is loaded as weights only."""
    package = Path(__file__).resolve().parents[3] / "src" / "lowtide" / "runtime" / "checkpoints"
    source = "\n".join(path.read_text(encoding="utf-8") for path in package.glob("*.py"))
    imported = r"^\s*(import|from) (pickle|cloudpickle|marshal|shelve|yaml|importlib)\b"
    assert not re.search(
        imported + r"|(?<![.\w])(eval|exec|__import__)\(|torch\.load\((?!.*weights_only=True)", source, re.MULTILINE
    )
