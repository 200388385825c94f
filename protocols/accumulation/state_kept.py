"""The pieces of a state that are here already, in memory and optionally in a file.

    kept = KeptPieces(folder)                # None: in memory only
    await kept.begin(manifest)               # what of this state is here is in `kept.here`
    kept.put(number, data); await kept.write_down()
    state = kept.finish()

An interrupted download goes on where it was, in this process with the same object, in another
through the file. Pieces are found again by their digests, so nothing on disk has to be believed,
and pieces that did not change from one epoch to the next are not fetched again.

Promise: a disk that fills, or a file that cannot be written, ends the keeping, with a line that
says so; never the download.

Easy to get wrong: the memory is the whole state, taken once. `begin` must come after the manifest
was checked against this peer's own model.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import torch
from blake3 import blake3

from protocols.accumulation.state_manifest import DIGEST_BYTES, Manifest, piece_span
from protocols.accumulation.training_state import TrainingState
from protocols.blocking import in_thread
from protocols.errors import ProtocolMisuse
from protocols.tensors import raw_bytes

log = logging.getLogger("potluck.state")

FILE_NAME = "state-being-fetched"


class KeptPieces:
    """Invariant: the bytes of every piece in `here` have the digest that the manifest says."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = None if folder is None else folder / FILE_NAME
        self._manifest: Manifest | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unwritten: list[int] = []
        self.here: set[int] = set()

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            raise ProtocolMisuse("No state has been begun.")
        return self._manifest

    @property
    def bytes_here(self) -> int:
        return sum(_length(self.span(number)) for number in self.here)

    def span(self, number: int) -> slice:
        """Where a piece lies in the stream."""
        return piece_span(number, self.manifest.piece_bytes, len(self._memory))

    async def begin(self, manifest: Manifest) -> None:
        """From now on it is this state. What is here of it is found, in memory and in the file."""
        await in_thread(self._begin, manifest)

    def put(self, number: int, data: memoryview) -> None:
        """Keep a piece that has been verified."""
        raw_bytes(self._memory)[self.span(number)] = data
        self.here.add(number)
        if self._file is not None:
            self._unwritten.append(number)

    async def write_down(self) -> None:
        """Write into the file what is not there yet."""
        if self._unwritten and self._file is not None:
            await in_thread(self._write_down)

    def finish(self) -> TrainingState:
        """The whole state. The file is removed, and nothing is kept any more."""
        if len(self.here) != self.manifest.piece_count:
            raise ProtocolMisuse("Not all pieces of the state are here.")
        state = TrainingState(self.manifest, self._memory)
        self._manifest, self.here, self._unwritten = None, set(), []
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            with contextlib.suppress(OSError):  # a file in the way is written over the next time
                self._file.unlink(missing_ok=True)
                self._file.parent.rmdir()
        return state

    def _begin(self, manifest: Manifest) -> None:
        """In a worker thread."""
        before, here = self._manifest, self.here
        self._manifest, self.here, self._unwritten = manifest, set(), []
        if before is None or before.stream_bytes != manifest.stream_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # let go of it before taking more
            self._memory = torch.empty(manifest.stream_bytes, dtype=torch.uint8)
            here = set()
        elif before.piece_bytes == manifest.piece_bytes:
            self.here = {
                number
                for number in here
                if before.piece_digest(number) == manifest.piece_digest(number)
            }
        if self._file is not None:
            self._read_back(self._file, manifest)

    def _read_back(self, file: Path, manifest: Manifest) -> None:
        memory = raw_bytes(self._memory)
        found = 0
        try:
            with open(file, "rb", buffering=0) as kept:
                for number in range(manifest.piece_count):
                    if number in self.here:
                        continue
                    span = self.span(number)
                    kept.seek(span.start)
                    if kept.readinto(memory[span]) != _length(span):
                        break
                    digest = blake3(memory[span]).digest(DIGEST_BYTES)
                    if digest == manifest.piece_digest(number):
                        self.here.add(number)
                        found += 1
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be read, so that download begins anew: %s", file, error)
        if found:
            log.info("going on with %d pieces of a state that were here before", found)

    def _write_down(self) -> None:
        """In a worker thread."""
        assert self._file is not None
        unwritten, self._unwritten = self._unwritten, []
        memory = raw_bytes(self._memory)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # never through a link, which somebody else might have put there
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._file, flags, 0o600)
            try:
                for number in unwritten:
                    _write_at(descriptor, memory, self.span(number))
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning(
                "a state that is being fetched is not kept on disk, so that an interruption would "
                "cost it: %s (%s)",
                error.strerror,
                self._file,
            )
            self._remove()

    def _remove(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)
        self._file = None


def _write_at(descriptor: int, memory: memoryview, span: slice) -> None:
    position = span.start
    while position < span.stop:
        position += os.pwrite(descriptor, memory[position : span.stop], position)


def _length(span: slice) -> int:
    return int(span.stop - span.start)
