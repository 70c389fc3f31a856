"""One checkpoint in a folder: written tensor by tensor at its place, and read back with every byte verified.

The files are safetensors files, laid out before the first value comes (`layout`), and an index, which is written last
(`index`). Neither side ever holds a second copy of more than a block. Nothing that is read is ever run.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
import threading
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import torch

from lowtide.errors import (
    BadRecordError,
    CheckpointError,
    CheckpointWriteError,
    ConfigError,
    DamagedCheckpointError,
    did_you_mean,
)
from lowtide.plain_text import Plain
from lowtide.runtime.checkpoints.blocks import (
    DIRECT_BYTES,
    blocks_of,
    bytes_of,
    checksum_of,
    combined,
    read_all,
    read_in_blocks,
    write_all,
)
from lowtide.runtime.checkpoints.disk import Disk, told_with_file
from lowtide.runtime.checkpoints.index import (
    INDEX_NAME,
    Index,
    TextFile,
    check_plain,
    check_text_name,
    from_text,
    to_text,
)
from lowtide.runtime.checkpoints.layout import MAX_FILE_BYTES, Place, Shard, TensorSpec, hugging_face_index, shards_of
from lowtide.units import MiB, format_bytes

__all__ = ["CheckpointReader", "CheckpointWriter", "Index", "TensorSpec"]

_HUGGING_FACE_INDEX = ".safetensors.index.json"
_MOST_INDEX_BYTES = 1024 * MiB
_DAMAGE = {
    errno.ENOENT: "it is missing",
    errno.ENOTDIR: "its folder is none",
    errno.EISDIR: "it is a folder",
    errno.ENXIO: "it is no ordinary file",
    errno.ELOOP: "it is a link, and may point anywhere",
    errno.EIO: "the disk cannot read it",
    errno.EBADMSG: "the disk cannot read it",
    errno.ESTALE: "it is gone",
}
"""What another reader would find as well. The rest, such as too many open files, says nothing about the checkpoint."""


class CheckpointWriter:
    """The files of one checkpoint, in a folder that is empty and that nobody reads yet.

    All files are made at once at their full length. `write` may then be called from several threads. The folder is a
    checkpoint once `finish` has returned; its own name it gets by `RunFolder.publish`.

    Args:
        folder: An empty folder, from `RunFolder.begin`.
        files: The tensors of each section, as in `{"model": {"head.weight": spec}}`. Tensors are laid out in this order, which
            should be the order in which they are read.
        max_file_bytes: A section beyond this is split into several files.
        disk: The operations on files; tests put their own here.

    Raises:
        CheckpointWriteError: The disk has no room for the files, or cannot be written.
        ConfigError: A name or a dtype cannot be saved.
    """

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, Mapping[str, TensorSpec]],
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        disk: Disk | None = None,
    ) -> None:
        self._folder = folder
        self._disk = Disk() if disk is None else disk
        self._shards = {file: shards_of(file, specs, max_file_bytes) for file, specs in files.items()}
        self._places = {
            (file, name): (shard, place)
            for file, shards in self._shards.items()
            for shard in shards
            for name, place in shard.places.items()
        }
        self._texts: dict[str, bytes] = {}
        self._lock = threading.Condition()
        self._writers: set[int] = set()
        """Threads that are writing, by number. One that has died was broken off before it could say that it is done."""
        self._pieces: dict[tuple[str, str], dict[int, tuple[int, int | None]]] = {key: {} for key in self._places}
        """For each tensor, where its pieces begin, their bytes and, once they are written, their CRC-32."""
        self._failure: BaseException | None = None
        self._descriptors: dict[str, int] = {}
        """Open from here to `close`."""
        self._direct: dict[str, int] = {}
        """The same, for writes past the page cache, of files that have enough for it."""
        try:
            self._make_files()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(shard.num_bytes for shards in self._shards.values() for shard in shards)

    def write(self, file: str, name: str, value: torch.Tensor, *, start: int | None = None) -> None:
        """Write one tensor, or a piece of it, at its place. The value must not change before the call returns.

        Args:
            file: The section.
            name: The tensor's name in it.
            value: On the host and contiguous, of the dtype and shape that was announced.
            start: Where the value is a piece: the element of the flattened tensor with which it begins. Pieces come in any
                order and from any thread.

        Raises:
            CheckpointWriteError: The bytes could not be written, now or in a call before.
            CheckpointError: The value is not the one that was announced, or is written a second time.
        """
        shard, place = self._expected(file, name, value, start)
        data = bytes_of(value)
        if not data:
            return
        begin = (start or 0) * place.spec.dtype.itemsize
        pieces = self._pieces[file, name]
        with self._writing():
            with self._lock:
                if begin in pieces:
                    raise CheckpointError(f"element {start or 0} of {name!r} of {file} is written twice; write it once")
                pieces[begin] = (len(data), None)
            pieces[begin] = (len(data), self._write_bytes(shard.name, data, place.offset + begin))

    def add_file(self, name: str, text: str) -> None:
        """Add a file of text, such as `config.json`.

        Raises:
            ConfigError: The name is a path, hidden, or taken.
        """
        check_text_name(name)
        if name in self._texts or name.endswith(_HUGGING_FACE_INDEX):
            raise ConfigError(f"the name {name!r} is taken; give each file of a checkpoint a name of its own")
        self._texts[name] = text.encode()

    def finish(self, *, step: int, state: Mapping[str, Plain]) -> Index:
        """Make the checkpoint whole: all files are on the disk, and last of all the index, when this returns.

        Raises:
            CheckpointError: A tensor was not written, or only in part.
            CheckpointWriteError: The files could not be written or synced.
            ConfigError: The state is not plain data, or the step no whole number.
        """
        if type(step) is not int or step < 0:
            raise ConfigError(f"step is {step!r}; give a whole number from 0 on", key="step")
        state = dict(state)
        check_plain(state)
        with self._writing():
            checksums: dict[str, dict[str, int]] = {file: {} for file in self._shards}
            for (file, name), (_, place) in self._places.items():
                checksums[file][name] = _whole_checksum(file, name, place, self._pieces[file, name])
            for name, descriptor in self._descriptors.items():
                with self._told("sync", name):
                    self._disk.sync(descriptor)
            index = Index(step=step, state=state, files=self._shards, checksums=checksums, texts=self._write_texts())
            self._write_file(INDEX_NAME, to_text(index))
            with told_with_file(self._disk, self._folder.parent, "sync", self._folder):
                self._disk.sync_folder(self._folder)
        self.close()
        return index

    def close(self) -> None:
        """Close the files. Without `finish` before, what was written is worth nothing: `RunFolder.abandon` takes it away."""
        with self._lock:
            self._failure = self._failure or CheckpointError("its writer is closed")
            # A descriptor that is closed under a thread's hands may be another file's by its next write.
            while self._writers & {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}:
                self._lock.wait(timeout=0.1)
            descriptors = [*self._direct.values(), *self._descriptors.values()]
            self._direct, self._descriptors = {}, {}
        for descriptor in descriptors:
            # What the files hold is synced by now, or is given up.
            with suppress(OSError):
                self._disk.close(descriptor)

    def _make_files(self) -> None:
        for shards in self._shards.values():
            for shard in shards:
                with self._told("make room for", shard.name):
                    self._descriptors[shard.name] = self._disk.create(self._folder / shard.name, shard.num_bytes)
                if shard.num_bytes >= DIRECT_BYTES:
                    direct = self._disk.open_direct(self._folder / shard.name)
                    if direct is not None:
                        self._direct[shard.name] = direct
                self._write_bytes(shard.name, memoryview(shard.header), 0)

    def _expected(self, file: str, name: str, value: torch.Tensor, start: int | None) -> tuple[Shard, Place]:
        if (file, name) not in self._places:
            raise CheckpointError(f"no tensor {name!r} of {file} was announced to this checkpoint; give its spec first")
        shard, place = self._places[file, name]
        spec = place.spec
        if start is None:
            fits = tuple(value.shape) == spec.shape
        else:
            fits = value.dim() == 1 and 0 <= start <= start + value.numel() <= spec.nbytes // spec.dtype.itemsize
        if not fits or value.dtype is not spec.dtype:
            piece = "" if start is None else f", as a piece from element {start}"
            raise CheckpointError(
                f"{name!r} of {file} was announced as {list(spec.shape)} in {spec.dtype} and given as {list(value.shape)} in "
                f"{value.dtype}{piece}; save what was announced"
            )
        return shard, place

    def _write_bytes(self, name: str, data: memoryview, offset: int) -> int:
        """The CRC-32 of the bytes."""
        checksum = 0
        for place, fits in blocks_of(data, offset):
            self._refuse_after_failure()
            block = data[place]
            checksum = zlib.crc32(block, checksum)
            with self._told("write", name):
                if not (fits and self._write_direct(name, block, offset + place.start)):
                    write_all(self._disk, self._descriptors[name], block, offset + place.start)
        return checksum

    def _write_direct(self, name: str, block: memoryview, offset: int) -> bool:
        """Whether all of it went past the page cache. What a disk refuses so, or takes in part, goes through it."""
        if name not in self._direct:
            return False
        try:
            return self._disk.write(self._direct[name], block, offset) == len(block)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                raise
            return False

    def _write_texts(self) -> dict[str, TextFile]:
        texts = dict(self._texts)
        for file, shards in self._shards.items():
            if len(shards) > 1:
                plain = hugging_face_index(shards)
                texts[f"{file}{_HUGGING_FACE_INDEX}"] = (json.dumps(plain, indent=2) + "\n").encode()
        for name, text in texts.items():
            self._write_file(name, text)
        return {name: TextFile(num_bytes=len(text), crc32=zlib.crc32(text)) for name, text in texts.items()}

    def _write_file(self, name: str, text: bytes) -> None:
        with self._told("make room for", name):
            self._descriptors[name] = self._disk.create(self._folder / name, len(text))
        self._write_bytes(name, memoryview(text), 0)
        with self._told("sync", name):
            self._disk.sync(self._descriptors[name])

    @contextmanager
    def _told(self, doing: str, name: str) -> Iterator[None]:
        room = f", and the checkpoint takes {format_bytes(self.num_bytes)}"
        with told_with_file(self._disk, self._folder.parent, doing, self._folder / name, room=room):
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What fails inside makes the checkpoint worthless: after a failed sync, a second one would say that all is well."""
        with self._lock:
            self._refuse_after_failure()
            self._writers.add(threading.get_ident())
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or error
            raise
        finally:
            with self._lock:
                self._writers.discard(threading.get_ident())
                self._lock.notify_all()

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise CheckpointWriteError(
                f"{self._folder.name} cannot be written any more: {self._failure}; begin a new save"
            ) from self._failure


class CheckpointReader:
    """A checkpoint, opened for reading from any number of threads.

    Opening reads the index and checks that each file is there, of its length, and has its header. The bytes of a tensor are
    verified when it is read, those of all by `verify`.

    Raises:
        DamagedCheckpointError: The folder is no checkpoint, or a damaged one, or of another schema.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with self._told(INDEX_NAME):
            self.index = from_text(self._whole_file(INDEX_NAME, None))
        for shard in itertools.chain.from_iterable(self.index.files.values()):
            with self._told(shard.name), self._opened(shard.name, shard.num_bytes) as descriptor:
                header = bytearray(len(shard.header))
                read_all(descriptor, memoryview(header), 0)
                if header != shard.header:
                    raise BadRecordError("its header is not the one that was saved")
        for name, text in self.index.texts.items():
            with self._told(name), self._opened(name, text.num_bytes):
                pass

    def names(self, file: str) -> Mapping[str, TensorSpec]:
        """The tensors of a section, in the order of their bytes; reading in this order is fastest."""
        return {name: place.spec for shard in self._shards_of(file) for name, place in shard.places.items()}

    def read(self, file: str, name: str, into: torch.Tensor | None = None) -> torch.Tensor:
        """One tensor with the values that were saved, to the bit.

        Args:
            file: The section.
            name: The tensor's name in it.
            into: Where the values go, of the same dtype and shape. On the host and contiguous, it is read into directly; a
                contiguous one on a device is filled in blocks. If the values turn out to be damaged, what is in it is worthless.

        Returns:
            `into`, or a new tensor on the host.

        Raises:
            DamagedCheckpointError: The bytes are not those that were saved, or the file is gone.
            CheckpointError: There is no such tensor, or `into` is of another dtype or shape.
        """
        shard, place = self._found(file, name)
        spec = place.spec
        if into is None:
            into = torch.empty(spec.shape, dtype=spec.dtype)
        if TensorSpec.of(into) != spec:
            raise CheckpointError(
                f"{name!r} of {file} is {list(spec.shape)} in {spec.dtype}, and is to be read into {list(into.shape)} in "
                f"{into.dtype}; give a tensor like the saved one"
            )
        values = into.detach()
        with self._told(shard.name), self._opened(shard.name, shard.num_bytes) as descriptor:
            if values.device.type == "cpu" and values.is_contiguous():
                checksum = read_all(descriptor, bytes_of(values), place.offset)
            elif values.is_contiguous():
                checksum = read_in_blocks(descriptor, values.reshape(-1), place.offset)
            else:
                whole = torch.empty(spec.shape, dtype=spec.dtype)
                checksum = read_all(descriptor, bytes_of(whole), place.offset)
                values.copy_(whole)
            self._check(file, name, checksum)
        return into

    def text(self, name: str) -> str:
        """A file of text that was saved with it.

        Raises:
            DamagedCheckpointError: It is not what was saved.
            CheckpointError: There is no such file.
        """
        if name not in self.index.texts:
            advice = did_you_mean(name, self.index.texts)
            raise CheckpointError(f"{self.folder.name} in {self.folder.parent} has no file {name!r}; {advice}")
        expected = self.index.texts[name]
        with self._told(name):
            text = self._whole_file(name, expected.num_bytes)
            if zlib.crc32(text) != expected.crc32:
                raise BadRecordError("its bytes are not those that were saved")
            return text.decode()

    def verify(self, *, num_threads: int = 4) -> None:
        """Read every byte.

        Raises:
            DamagedCheckpointError: One of them is not what was saved.
        """
        for name in self.index.texts:
            self.text(name)
        with ThreadPoolExecutor(num_threads) as pool:
            tasks = [
                pool.submit(self._verify_tensor, file, name, shard, place)
                for file, shards in self.index.files.items()
                for shard in shards
                for name, place in shard.places.items()
            ]
            try:
                for task in tasks:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()

    def _verify_tensor(self, file: str, name: str, shard: Shard, place: Place) -> None:
        with self._told(shard.name), self._opened(shard.name, shard.num_bytes) as descriptor:
            self._check(file, name, checksum_of(descriptor, place.offset, place.spec.nbytes))

    def _check(self, file: str, name: str, checksum: int) -> None:
        if checksum != self.index.checksums[file][name]:
            raise BadRecordError(f"the bytes of {name!r} are not those that were saved")

    def _shards_of(self, file: str) -> tuple[Shard, ...]:
        if file not in self.index.files:
            advice = did_you_mean(file, self.index.files)
            raise CheckpointError(f"{self.folder.name} in {self.folder.parent} has no section {file!r}; {advice}")
        return self.index.files[file]

    def _found(self, file: str, name: str) -> tuple[Shard, Place]:
        for shard in self._shards_of(file):
            if name in shard.places:
                return shard, shard.places[name]
        raise CheckpointError(
            f"{self.folder.name}/{file} in {self.folder.parent} has no tensor {name!r}; "
            f"{did_you_mean(name, self.names(file), num_listed=3)}"
        )

    def _whole_file(self, name: str, num_bytes: int | None) -> bytes:
        with self._opened(name, num_bytes) as descriptor:
            num_bytes = os.fstat(descriptor).st_size
            if num_bytes > _MOST_INDEX_BYTES:
                raise BadRecordError(f"it has {num_bytes:,} bytes, which none that Lowtide writes has")
            text = bytearray(num_bytes)
            read_all(descriptor, memoryview(text), 0)
        return bytes(text)

    @contextmanager
    def _opened(self, name: str, num_bytes: int | None) -> Iterator[int]:
        """A descriptor of a file of the folder itself: no link, which may point anywhere, no pipe, which would wait."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self.folder / name, flags)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise BadRecordError("it is no ordinary file")
            if num_bytes is not None and found.st_size != num_bytes:
                raise BadRecordError(f"it has {found.st_size:,} bytes of {num_bytes:,}")
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """What is wrong with a file, with its path inside the run folder and what to do."""
        inside = f"{self.folder.name}/{name}"
        try:
            yield
        except (OSError, BadRecordError, UnicodeDecodeError) as error:
            reason = str(error)
            if isinstance(error, OSError):
                if error.errno not in _DAMAGE:
                    raise CheckpointError(
                        f"cannot read {inside} in {self.folder.parent}: {error}", file=inside
                    ) from error
                reason = _DAMAGE[error.errno]
            raise DamagedCheckpointError(
                f"{inside} in {self.folder.parent} cannot be used: {reason}. Load another checkpoint, or copy the file here "
                "again from where it is whole",
                file=inside,
            ) from error


def _whole_checksum(file: str, name: str, place: Place, pieces: Mapping[int, tuple[int, int | None]]) -> int:
    """The CRC-32 of a tensor whose pieces are all written.

    Raises:
        CheckpointError: One is missing, not written yet, or overlaps the next.
    """
    end, done = 0, []
    for begin, (num_bytes, checksum) in sorted(pieces.items()):
        if begin != end or checksum is None:
            break
        done.append((num_bytes, checksum))
        end += num_bytes
    if end != place.spec.nbytes or len(done) != len(pieces):
        raise CheckpointError(
            f"{name!r} of {file} is not whole: its first {end:,} of {place.spec.nbytes:,} bytes are written in pieces that "
            "follow one another; write every piece once before the checkpoint is finished"
        )
    return combined(done)
