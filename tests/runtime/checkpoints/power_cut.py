"""Disks for tests: one that records every operation, one that fails at the one that is asked for, and what a power cut leaves.

After a power cut a disk has, of every file, what was written before its last sync, and of every folder the names that it had
at its last sync. What came later may be there too: of names the first few changes, of bytes any.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from lowtide.runtime.checkpoints.disk import Disk

Left: TypeAlias = Literal["all", "synced", "some"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One change, by paths inside of `root`; a file is known by its number, since folders change their names."""

    kind: Literal["make_folder", "create", "write", "sync", "sync_folder", "rename", "unlink", "remove_folder"]
    path: Path = Path()
    new_path: Path = Path()
    file: int = -1
    offset: int = 0
    data: bytes = b""
    num_bytes: int = 0


class QuickDisk(Disk):
    """Does not wait for a real disk: what the syncs are for is tested on recorded operations."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


class RecordedDisk(QuickDisk):
    """Does every operation, and writes it down."""

    def __init__(self, root: Path) -> None:
        self.operations: list[Operation] = []
        self._root = root
        self._files: dict[int, int] = {}
        self._numbers = itertools.count()

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self._record(Operation(kind="make_folder", path=self._inside(path)))

    def create(self, path: Path, num_bytes: int) -> int:
        descriptor = super().create(path, num_bytes)
        self._files[descriptor] = next(self._numbers)
        self._record(
            Operation(kind="create", path=self._inside(path), file=self._files[descriptor], num_bytes=num_bytes)
        )
        return descriptor

    def open_direct(self, path: Path) -> int | None:
        descriptor = super().open_direct(path)
        if descriptor is not None:
            same = next(number for number in self._files if os.path.samestat(os.fstat(number), os.fstat(descriptor)))
            self._files[descriptor] = self._files[same]
        return descriptor

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        written = super().write(descriptor, data, offset)
        self._record(Operation(kind="write", file=self._files[descriptor], offset=offset, data=bytes(data[:written])))
        return written

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self._record(Operation(kind="sync", file=self._files[descriptor]))

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._record(Operation(kind="sync_folder", path=self._inside(path)))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self._record(Operation(kind="rename", path=self._inside(old), new_path=self._inside(new)))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._record(Operation(kind="unlink", path=self._inside(path)))

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self._record(Operation(kind="remove_folder", path=self._inside(path)))

    def _inside(self, path: Path) -> Path:
        return path.relative_to(self._root)

    def _record(self, operation: Operation) -> None:
        self.operations.append(operation)


class FaultyDisk(QuickDisk):
    """Calls `fault` in place of the operation of that number, and of all later ones where it is `lasting`."""

    def __init__(self, number: int, fault: Callable[[], int], *, lasting: bool = False) -> None:
        self.count = 0
        self._number = number
        self._fault = fault
        self._lasting = lasting

    def make_folder(self, path: Path) -> None:
        self._may_fail()
        super().make_folder(path)

    def create(self, path: Path, num_bytes: int) -> int:
        self._may_fail()
        return super().create(path, num_bytes)

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        if self._is_next():
            # A short write: the disk takes a part, or nothing.
            return super().write(descriptor, data[: self._fault()], offset)
        return super().write(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        self._may_fail()
        super().sync(descriptor)

    def sync_folder(self, path: Path) -> None:
        self._may_fail()
        super().sync_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self._may_fail()
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._may_fail()
        super().unlink(path)

    def remove_folder(self, path: Path) -> None:
        self._may_fail()
        super().remove_folder(path)

    def heal(self) -> None:
        """From now on nothing fails."""
        self._number = 1 << 62

    def _is_next(self) -> bool:
        self.count += 1
        return self.count > self._number if self._lasting else self.count == self._number + 1

    def _may_fail(self) -> None:
        if self._is_next():
            self._fault()


@dataclass
class _File:
    synced: bytes = b""
    live: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def left(self, how: Left, chance: random.Random) -> bytes:
        if how == "all":
            return bytes(self.live)
        if how == "synced" or chance.random() < 0.2:
            return self.synced
        content = bytearray(self.synced.ljust(len(self.live), b"\0"))
        for offset, data in self.pending:
            if chance.random() < 0.5:
                content[offset : offset + len(data)] = data
        return bytes(content)


@dataclass
class _Folder:
    live: dict[str, _Folder | _File] = field(default_factory=dict)
    history: list[dict[str, _Folder | _File]] = field(default_factory=lambda: [{}])
    """Its names when it was last synced, and after each change since."""

    def changed(self) -> None:
        self.history.append(dict(self.live))

    def left(self, how: Left, chance: random.Random) -> dict[str, _Folder | _File]:
        return self.history[{"all": -1, "synced": 0}.get(how, chance.randrange(len(self.history)))]


def replay(operations: Sequence[Operation], target: Path, how: Left, seed: int = 0) -> None:
    """Write into a folder what the disk has after these operations and a kill (`all`) or a power cut."""
    root, files = _Folder(), dict[int, _File]()
    for operation in operations:
        _apply(root, files, operation)
    _write_out(root, target, how, random.Random(seed))


def _apply(root: _Folder, files: dict[int, _File], operation: Operation) -> None:
    if operation.kind in {"write", "sync"}:
        file = files[operation.file]
        if operation.kind == "sync":
            file.synced, file.pending = bytes(file.live), []
        else:
            file.live[operation.offset : operation.offset + len(operation.data)] = operation.data
            file.pending.append((operation.offset, operation.data))
        return
    parent, name = _folder_of(root, operation.path.parent), operation.path.name
    match operation.kind:
        case "make_folder":
            parent.live[name] = _Folder()
        case "create":
            parent.live[name] = files[operation.file] = _File(live=bytearray(operation.num_bytes))
        case "rename":
            assert operation.path.parent == operation.new_path.parent
            assert operation.new_path.name not in parent.live
            parent.live[operation.new_path.name] = parent.live.pop(name)
        case "unlink" | "remove_folder":
            del parent.live[name]
        case "sync_folder":
            folder = _folder_of(root, operation.path)
            folder.history = [dict(folder.live)]
            return
        case _:
            raise AssertionError(operation)
    parent.changed()


def _folder_of(root: _Folder, path: Path) -> _Folder:
    folder = root
    for name in path.parts:
        found = folder.live[name]
        assert isinstance(found, _Folder)
        folder = found
    return folder


def _write_out(folder: _Folder, target: Path, how: Left, chance: random.Random) -> None:
    target.mkdir()
    for name, node in folder.left(how, chance).items():
        if isinstance(node, _Folder):
            _write_out(node, target / name, how, chance)
        else:
            (target / name).write_bytes(node.left(how, chance))
