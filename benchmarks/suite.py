"""Run a suite of rows, one process each, and write one record."""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.records import machine

Row = dict[str, Any]

READY = "ready"
SERVE = "--serve"
NUM_READY = 6
"""Processes that wait for their turn: each has some 0.7 GB of host memory."""


class RowProcess:
    """One row in a process of its own, which imports what it needs at once and begins when it is told to.

    So several rows import beside each other, some eight seconds, and none imports while another is measured.
    """

    def __init__(self, module: str, row: Row) -> None:
        self.row = row
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", module, json.dumps(row), "--wait"]
        # A row may name the folder of another version of the repository, to be compared with this one.
        folder = row.get("folder")
        env = None if folder is None else {**os.environ, "PYTHONPATH": os.pathsep.join(("src", "."))}
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env, cwd=folder)

    def wait_until_ready(self) -> None:
        """Until it has imported everything; one that died meanwhile says so when it is run."""
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def run(self, timeout_s: float) -> Row:
        """Let it begin, and wait for its answer; a death without one is a result too."""
        deadline_s = time.monotonic() + timeout_s
        message: str | None = "go\n"
        while True:
            try:
                out, err = self._process.communicate(message, timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                message = None  # it is on its way; what was read so far is kept
            if (used_bytes := self._resident_bytes()) > self.row.get("host_limit_bytes", float("inf")):
                self.end()
                return {**self.row, "failed": f"host memory: {used_bytes / 2**30:.1f} GiB in use"}
            if time.monotonic() > deadline_s:
                return {**self.row, "failed": f"no answer after {timeout_s:.0f} s", "message": self.end()[-1500:]}
        lines = out.strip().splitlines()
        if self._process.returncode or not lines:
            return {**self.row, "failed": f"exit code {self._process.returncode}", "message": err[-1500:]}
        answer: Row = json.loads(lines[-1])
        return answer

    def _resident_bytes(self) -> int:
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    def end(self) -> str:
        """Stop it, wherever it is. Returns what it wrote to its standard error."""
        self._process.kill()
        return self._process.communicate()[1]


class RowServer:
    """A process that runs rows one after the other: each saves the seconds that imports and a device's context take."""

    def __init__(self, module: str) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it ends with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "[]", SERVE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip

    def run(self, row: Row, timeout_s: float) -> Row:
        """The row's result; where the process dies or takes too long, that, and it takes no row after it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(row) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith("{"):
                    found: Row = json.loads(line)
                    return found
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        self._log.seek(0)
        code = self._process.wait()
        return {**row, "failed": f"exit code {code}, at most {timeout_s:.0f} s", "message": self._log.read()[-1500:]}

    @property
    def is_alive(self) -> bool:
        """Whether it takes another row."""
        return self._process.poll() is None

    def end(self) -> None:
        """Stop it, wherever it is."""
        self._process.kill()
        self._process.communicate()


def answer(run: Callable[[Row], Row], load: Callable[[], None] = lambda: None) -> None:
    """What a row's process does: load, wait where asked to, run, and print the result as its last line.

    With `--serve` the rows come in lines, and their results go out in lines.
    """
    row = json.loads(sys.argv[1])
    if SERVE in sys.argv[2:]:
        load()
        for line in sys.stdin:
            _answer_one(run, json.loads(line))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return
    if "--wait" in sys.argv[2:]:
        load()
        row["imported_s"] = time.time() - psutil.Process().create_time()
        print(READY, flush=True)
        sys.stdin.readline()
    _answer_one(run, row)


def _answer_one(run: Callable[[Row], Row], row: Row) -> None:
    """A failure is a result."""
    try:
        result = run(row)
    except torch.OutOfMemoryError as error:
        result = {**row, "failed": "out of memory", "message": str(error)[:500]}
    except Exception as error:
        import traceback

        where = traceback.format_exc()[-3000:]
        result = {**row, "failed": type(error).__name__, "message": f"{error}"[:2000], "where": where}
    print(json.dumps(result), flush=True)


def results_together(module: str, groups: Sequence[Sequence[Row]], timeout_s: float) -> Iterator[Row]:
    """The results of all rows: each group's in one process, unless a row ends it."""
    servers = [RowServer(module) for _ in groups]  # they import beside each other
    try:
        for server, rows in zip(tuple(servers), groups, strict=True):
            now = server
            for row in rows:
                if not now.is_alive:
                    now = RowServer(module)
                    servers.append(now)
                yield now.run(row, timeout_s)
            now.end()
    finally:
        for server in servers:
            server.end()


def results(module: str, rows: Sequence[Row], timeout_s: float) -> Iterator[Row]:
    for start in range(0, len(rows), NUM_READY):
        processes = [RowProcess(module, row) for row in rows[start : start + NUM_READY]]
        try:
            for process in processes:
                process.wait_until_ready()
            while processes:
                yield processes[0].run(timeout_s)
                processes.pop(0)
        finally:
            for process in processes:
                process.end()


def main(
    modules: str | Mapping[str, str],
    schema: str,
    suites: Mapping[str, Sequence[Row]],
    prepare: Callable[[str], None] = lambda suite: None,
) -> None:
    """The command line: SUITE --out FOLDER --commit HASH [--match TEXT].... `modules`: what runs a row, of each suite or of all."""
    from lowtide.lab.record import write_json  # here: a row's process imports this module, and not the lab

    parser = argparse.ArgumentParser()
    parser.add_argument("suite", choices=sorted(suites))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--timeout", type=float, default=150.0)
    parser.add_argument(
        "--match", action="append", default=[], help="only rows whose name has this in it; may be repeated"
    )
    arguments = parser.parse_args()
    prepare(arguments.suite)
    module = modules if isinstance(modules, str) else modules[arguments.suite]
    record: dict[str, Any] = {
        "schema": schema,
        "suite": arguments.suite,
        "commit": arguments.commit,
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "machine": machine(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "rows": [],
    }
    kind = "h200" if torch.cuda.is_available() else "cpu"
    path = arguments.out / f"{arguments.suite}_{time.strftime('%Y-%m-%dT%H%M')}_{kind}_{arguments.commit}.json"
    wanted = arguments.match or [""]
    rows = [row for row in suites[arguments.suite] if any(text in row["name"] for text in wanted)]
    if not rows:
        raise SystemExit(f"no row of {arguments.suite} has {arguments.match!r} in its name")
    for result in results(module, rows, arguments.timeout):
        record["rows"].append(result)
        write_json(path, record)  # after each row: what was measured is not lost with the next one
        shown = result.get("failed") or f"{1000 * float(str(result['median_s'])):.0f} ms"
        reserved = float(str(result.get("max_reserved_bytes", 0))) / 2**30
        print(f"{result['name']}: {shown}, reserved {reserved:.2f} GiB {result.get('message', '')}", flush=True)
    print(f"wrote {path}")
