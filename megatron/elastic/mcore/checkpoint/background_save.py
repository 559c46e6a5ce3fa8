"""Megatron's own checkpoints, written while training goes on.

``save_checkpoint`` stays Megatron's. It runs as for ``--async-save``: the sharded
state dict is planned (the only part during which ranks wait) and returned as a request.
It is planned over empty tensors (:mod:`content`). A thread fills them from the state blocks
of that version and writes the files while steps go on. Each vote counts the ranks whose share
is written; when all are, all ranks finish the request together at the next boundary.

A checkpoint is complete or does not exist: files are written into ``iter_NNNNNNN.TAG.partial``,
which is renamed when all are complete; then the tracker file is replaced atomically. A new
generation voids the write, and it begins again at the next boundary.

Fencing: a rank that was stopped during a save may wake up after the other ranks have
saved again. TAG (generation, incarnation and a random number) differs in every save, so a
rank writes and renames only files of its own save. The next save removes these before it
begins. The lease of the rank's node is checked directly before each of the two renames
(:meth:`Membership.fence`).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron.elastic.comm.errors import CommError, GenerationChanged
from megatron.elastic.comm.exchange import gather_messages
from megatron.elastic.comm.fabric import Fabric
from megatron.elastic.engine.engine import Engine
from megatron.elastic.engine.failures import ActionFailed
from megatron.elastic.engine.transaction.save import StateStream, Want
from megatron.elastic.mcore.checkpoint.absent_parts import duties
from megatron.elastic.mcore.checkpoint.completeness import require_whole
from megatron.elastic.mcore.checkpoint.content import Content, strategy_for
from megatron.elastic.mcore.checkpoint.retention import discard, nothing_removed, save_folders
from megatron.elastic.mcore.checkpoint.state_dict import OptimizerCheckpoint, without_holes
from megatron.elastic.mcore.checkpoint.writing import write_file
from megatron.elastic.state.manifest import MANIFEST, FileHash, Manifest, files_below, hash_of
from megatron.elastic.state.record import StepRecord
from megatron.elastic.state.saved_contents import SavedContents, layout_digest

__all__ = ["BackgroundSave", "Folders", "Outcome"]

Outcome = Literal["done", "again", "none"]
"""Result of finishing a save: complete; interrupted, to be begun again; no save under way."""

_PARTIAL = ".partial"
_NEW = ".new"
_TRACKER = "latest_checkpointed_iteration"
_NOT_YET = "\n"
"""End of a tracker that Megatron may read but has not written yet, even if it names the same iteration."""
_ROOM_BYTES = 1 << 20
"""A disk with less free space counts as full."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_LOOK_SECONDS = 0.02
"""A wait for the disk looks so often for a new generation."""
_NICENESS = 10
"""Niceness of the writing thread, which has a lower priority than steps."""


class Folders:
    """The folder and tracker of a save under way, and their final renames.

    ``reach``: fault injection, (point, step). ``fence`` does not return if this rank must not write any more.
    """

    def __init__(self, reach: Callable[[str, int], None], fence: Callable[[], None]) -> None:
        self._reach = reach
        self._fence = fence
        self._tag = ""
        self._final: str | None = None
        self._tracker: str | None = None
        self._open = False

    @contextmanager
    def naming(self, tag: str) -> Iterator[None]:
        """Give Megatron partial names inside the context. ``tag``: unique to this save."""
        self._tag, self._open, self._final, self._tracker = tag, True, None, None
        try:
            yield
        finally:
            self._open = False

    def named(self, final: str) -> str:
        """Return the present name of the checkpoint ``final``."""
        if not self._open:
            return final
        self._final = final
        return self._partial(final)

    def _partial(self, final: str) -> str:
        return f"{final}.{self._tag}{_PARTIAL}"

    def _new(self, tracker: str) -> str:
        return f"{tracker}.{self._tag}{_NEW}"

    def tracked(self, tracker: str) -> str:
        """Return the present name of its tracker file. Megatron also reads the previous checkpoint there."""
        if not self._open:
            return tracker
        self._tracker = tracker
        if os.path.exists(tracker):
            with open(tracker, encoding="utf-8") as before, open(self._new(tracker), "w", encoding="utf-8") as new:
                new.write(before.read().strip() + _NOT_YET)
        return self._new(tracker)

    @property
    def folder(self) -> str:
        """The folder in which the checkpoint under way gets its name; empty if there is none."""
        return os.path.dirname(self._final or "")

    def final_name(self, path: str) -> str:
        """Return the name of a checkpoint once it is complete."""
        return path.removesuffix(self._partial(""))

    def commit(self, manifest: Manifest) -> int:
        """Complete a written checkpoint: add the manifest, rename the folder, then replace the tracker.

        On the rank that writes the tracker. ``manifest`` has the files of all writers. Returns the step that the
        tracker named before; 0 if it named none. Raises ``OSError`` if a file is missing or of another length.
        """
        if self._final is None or self._tracker is None:
            return 0
        _complete(Path(self._partial(self._final)), manifest)
        step = int("".join(filter(str.isdigit, os.path.basename(self._final))) or -1)
        self._reach("save_whole", step)
        self._fence()
        _put_in_place(self._partial(self._final), self._final)
        self._reach("save_named", step)
        with open(self._new(self._tracker), "rb") as file:
            os.fsync(file.fileno())
        self._fence()
        before = _step_in(self._tracker)
        os.replace(self._new(self._tracker), self._tracker)
        self._final = None
        self._reach("save_tracked", step)
        return before

    def is_written(self) -> bool:
        """Return whether Megatron has written the tracker of the save under way."""
        if self._final is None or self._tracker is None or not os.path.exists(self._new(self._tracker)):
            return False
        number = os.path.basename(self._final).removeprefix("iter_")
        with open(self._new(self._tracker), encoding="utf-8") as file:
            return number.isdigit() and file.read() == str(int(number))

    def sweep(self, save: str) -> None:
        """Remove unfinished files of earlier saves. On one rank, while no save is under way."""
        if os.path.isdir(save):
            for name in os.listdir(save):
                self._fence()
                if name.endswith((_PARTIAL, _PARTIAL + ".old")):
                    shutil.rmtree(os.path.join(save, name), ignore_errors=True)
                elif name.startswith(_TRACKER) and name.endswith(_NEW):
                    with suppress(FileNotFoundError):
                        os.remove(os.path.join(save, name))


def _step_in(tracker: str) -> int:
    """Return the step that a tracker names; 0 if there is no tracker, or it names a release."""
    try:
        named = Path(tracker).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return 0
    return int(named) if named.isdecimal() else 0


def _complete(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest``, extended by the other files of ``folder``: indices and common objects, which are small.

    Raises ``OSError`` if something is missing.
    """
    for name, file in manifest.files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != file.size:
            raise OSError(f"{name} of {folder} differs from the file that its writer reported")
    require_whole(folder)
    rest = {}
    for name in files_below(folder):
        if name not in manifest.files:
            rest[name] = hash_of(folder / name)
            _sync(folder / name)
    text = replace(manifest, files={**manifest.files, **rest}).to_text()
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    _sync(folder / MANIFEST)
    _sync(folder)


def _sync(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _all_files(fabric: Fabric, mine: Mapping[str, FileHash]) -> dict[str, FileHash]:
    """Return the files that all ranks have written, by name. Collective."""
    texts = gather_messages(fabric, str, json.dumps({name: (file.size, file.hash) for name, file in mine.items()}))
    return {name: FileHash(*file) for text in texts.values() for name, file in json.loads(text).items()}


def _all_contents(fabric: Fabric, mine: SavedContents) -> SavedContents:
    """Return the contents that all owners have handed to writers. Collective."""
    texts = gather_messages(fabric, str, json.dumps(mine.raw()))
    parts = [SavedContents.from_raw(json.loads(text)) for text in texts.values()]
    return SavedContents(mine.layout, {key: hash for part in parts for key, hash in part.blocks.items()})


def _put_in_place(partial: str, final: str) -> None:
    """Rename ``partial`` to ``final``; an older checkpoint of that name is exchanged, so one exists at any time."""
    if not os.path.isdir(final):
        os.rename(partial, final)
        return
    here, libc = ctypes.c_int(_AT_FDCWD), ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(here, os.fsencode(partial), here, os.fsencode(final), _RENAME_EXCHANGE) == 0:
        shutil.rmtree(partial, ignore_errors=True)
        return
    # The file system cannot exchange two names: for a moment neither checkpoint has the name.
    os.rename(final, partial + ".old")
    os.rename(partial, final)
    shutil.rmtree(partial + ".old", ignore_errors=True)


@contextmanager
def _writing(folder: str) -> Iterator[None]:
    """Turn errors inside, except communication errors, into ``OSError``: the checkpoint cannot be written."""
    try:
        yield
    except (CommError, OSError):
        raise
    except (Exception, CheckpointException) as error:
        raise _as_os_error(error, folder) from error


def _as_os_error(error: BaseException, path: str) -> OSError:
    """Return ``error`` as an ``OSError``; torch reports a full disk as a RuntimeError without the cause."""
    if isinstance(error, OSError):
        return error
    text = " ".join(str(error).split())[:200]
    with suppress(OSError):
        if shutil.disk_usage(os.path.dirname(path) or ".").free < _ROOM_BYTES:
            text = f"{os.strerror(errno.ENOSPC)} ({text})"
    return OSError(text or type(error).__name__)


@dataclass
class _Write:
    """One save under way on this rank."""

    generation: int
    record: StepRecord
    """Record of the saved version."""
    request: Any
    """Megatron's request; ``None`` on a rank that writes no file."""
    stream: StateStream
    content: Content
    reach: Callable[[], None]
    """Fault injection."""
    certificate: str
    """Digest of the newest certificate when the save began."""
    files: dict[str, FileHash] = field(default_factory=dict)
    """Files that this rank has written, by name."""
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def run(self) -> None:
        """Collect state and write it; the body of the thread."""
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            self.stream.run(self.content.deliver)
            self._write()
        except BaseException as error:  # raised again on the training thread
            self.error = error
        finally:
            self.done.set()

    def _write(self) -> None:
        if self.request is None or self.request.async_fn is None:
            return
        transforms, _ = self.request.async_fn.args
        _, buckets, results = self.request.async_fn_args
        written = {}
        for index, bucket in enumerate(buckets):
            self.reach()
            path, name, _ = bucket
            with _writing(path):
                written[index], self.files[name] = write_file(transforms, bucket)
        results.put(written)


class BackgroundSave:
    """The checkpoints of one rank. ``call`` of :meth:`begin` is Megatron's ``save_checkpoint`` with its arguments."""

    def __init__(self, engine: Engine, optimizer: OptimizerCheckpoint, args: Any, folders: Folders) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._args = args
        self._folders = folders
        self._write: _Write | None = None
        self._request: Any = None
        self._again = False

    # -- called at each vote -----------------------------------------------------------

    def cut_short(self) -> bool:
        """Return whether the save under way is void and has to be begun again."""
        return self._again or (self._write is not None and self._write.generation != self._engine.view.generation)

    def written(self) -> bool:
        """Return whether this rank's share is written, or has failed (:meth:`finish` raises the error)."""
        return self._write is not None and not self.cut_short() and self._write.done.is_set()

    # -- a save --------------------------------------------------------------------------

    def schedule(self, request: Any) -> None:
        """Take over the request for which Megatron would start a writing process."""
        self._request = request

    def begin(self, original: Callable[..., Any], call: Mapping[str, Any]) -> None:
        """Plan a save with all ranks, then write in the background. Raises ``ActionFailed`` if that is impossible."""
        self._again = True
        try:
            self._engine.fenced(lambda: self._begin(original, call), together=True)
        except ActionFailed:
            self._give_up()
            raise
        finally:
            self._again, self._optimizer.content = False, None

    def _begin(self, original: Callable[..., Any], call: Mapping[str, Any]) -> None:
        engine, fabric = self._engine, self._engine.tools.fabric
        self._abandon("it is begun again")
        engine.tools.reach("in_save", engine.record.version)
        content = self._optimizer.content = Content()
        tag = self._tag()
        if fabric.rank < engine.views.launch_topology.slots:
            self._plan(original, call, content, tag)
        request, self._request = self._request, None
        wants = gather_messages(fabric, tuple[Want, ...], tuple(content.wants))
        pool, placement = engine.tools.pool, engine.view.placement
        stream = StateStream(fabric, pool, placement, engine.views.layouts, engine.record, wants)
        reach, record, certified = engine.tools.reach, engine.record, engine.context.certificate
        self._write = _Write(
            engine.view.generation,
            record,
            request,
            stream,
            content,
            lambda: reach("save_writing", record.version),
            certified.digest if certified is not None else "",
        )
        engine.tools.threads.start("elastic-save", self._write.run)

    def _tag(self) -> str:
        """Return a tag that is unique to this save and equal on every rank. Collective.

        It has the generation, the incarnation of the rank that renames the checkpoint, and a random number of that
        rank, because a job that is started again counts the first two anew.
        """
        fabric = self._engine.tools.fabric
        leads, drawn = fabric.rank == fabric.alive[0], torch.zeros(2, dtype=torch.int64)
        if leads:
            drawn = torch.tensor([self._engine.agreement.membership.incarnation, secrets.randbits(32)])
        dist.all_reduce(drawn, group=fabric.world)
        incarnation, number = drawn.tolist()
        return f"g{self._engine.view.generation}.i{incarnation}.{number:08x}"

    def _plan(self, original: Callable[..., Any], call: Mapping[str, Any], content: Content, tag: str) -> None:
        """Have Megatron plan the save among the ranks of the launch; extra ranks only send state to the writers.

        Raises ``OSError`` if no rank of the launch is left.
        """
        engine, fabric = self._engine, self._engine.tools.fabric
        launch_topology = engine.views.launch_topology
        others = duties(launch_topology, engine.view.living).get(fabric.rank, ())
        context = dict(call["checkpointing_context"] or {})
        shapes = self._optimizer.as_launched(others)
        with without_holes(fabric, launch_topology.slots), self._folders.naming(tag), self._asynchronous(), shapes:
            if dist.get_rank() == 0:
                self._sweep()
            context["save_strategy"] = strategy_for(self._args, content)
            with _writing(self._args.save):
                original(**{**call, "checkpointing_context": context})

    @contextmanager
    def _asynchronous(self) -> Iterator[None]:
        """Have Megatron plan a save without writing it, inside the context."""
        args = self._args
        before = args.async_save, args.async_strategy
        args.async_save, args.async_strategy = True, "mcore"
        try:
            yield
        finally:
            args.async_save, args.async_strategy = before

    def finish(self) -> Outcome:
        """Complete the save under way, waiting for the slowest writer. The same outcome on every rank.

        Raises ``ActionFailed`` if it could not be written; training can go on.
        """
        try:
            outcome = self._engine.fenced(self._finish, together=True)
        except ActionFailed:
            self._give_up()
            raise
        if outcome == "done":
            self._write = None
        return outcome

    def _finish(self) -> Outcome:
        write, engine = self._write, self._engine
        # A rank that joined after the begin of the save does not know it.
        votes = torch.tensor([self.cut_short(), write is not None and not self.cut_short()], dtype=torch.int64)
        dist.all_reduce(votes, group=engine.tools.fabric.world)
        again, valid = votes.tolist()
        if again or not valid:
            return "again" if again else "none"
        assert write is not None
        self._await(write)
        engine.tools.reach("save_finish", write.record.version)
        if isinstance(write.error, OSError | CommError):
            raise write.error
        if write.error is not None:
            raise RuntimeError(f"the checkpoint of step {write.record.version} could not be written") from write.error
        files = _all_files(engine.tools.fabric, write.files)
        mine = SavedContents(layout_digest(engine.views.layouts), write.stream.contents)
        contents = _all_contents(engine.tools.fabric, mine)
        if write.request is not None:
            self._name(write, self._manifest(write, files, contents))
        # All ranks wait until it is renamed: if the rank that renames it is lost, the save is begun again.
        dist.barrier(group=engine.tools.fabric.world)
        return "done"

    def _manifest(self, write: _Write, files: Mapping[str, FileHash], contents: SavedContents) -> Manifest:
        incarnation = self._engine.agreement.membership.incarnation
        return Manifest(write.generation, incarnation, write.record.to_json(), write.certificate, files, contents)

    def _name(self, write: _Write, manifest: Manifest) -> None:
        """Have Megatron write the metadata of the files, then complete the checkpoint."""
        engine = self._engine
        with without_holes(engine.tools.fabric, engine.views.launch_topology.slots):
            for finalize in write.request.finalize_fns:
                with _writing(self._args.save), nothing_removed(self._args):
                    finalize()
                if dist.get_rank() == 0 and self._folders.is_written():
                    folder = self._folders.folder
                    discard(self._args, folder, self._folders.commit(manifest), write.record.version)

    def _give_up(self) -> None:
        """Remove the files of a failed save, which may fill the disk, once no rank writes there."""
        fabric = self._engine.tools.fabric

        def body() -> None:
            self._abandon("it could not be written")
            dist.barrier(group=fabric.world)

        self._engine.fenced(body)
        if fabric.alive[0] == fabric.rank:
            self._sweep()

    def _sweep(self) -> None:
        """Remove unfinished files of earlier saves. Megatron reads a number in each name where it keeps one save."""
        for folder in save_folders(self._args):
            self._folders.sweep(folder)

    def _abandon(self, why: str) -> None:
        """Abandon the save under way, if any. In a fenced action."""
        if self._write is not None:
            self._write.stream.abandon(why)
            # No other save may begin before its thread has stopped writing into the partial folder.
            self._await(self._write)
            self._write = None

    def _await(self, write: _Write) -> None:
        """Wait until a save's thread has ended. Raises ``GenerationChanged`` if a generation begins before.

        A disk may be slow. The other ranks wait for this one's report then, and would take it for a hung one.
        """
        present, membership = self._engine.view.generation, self._engine.agreement.membership
        while not write.done.wait(_LOOK_SECONDS):
            if membership.frozen() > present:
                raise GenerationChanged(membership.frozen())
