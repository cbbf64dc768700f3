"""Checkpoints of the Trainer: written aside and renamed when they are whole, and resumed from when they are whole.

The stock Trainer writes into ``output_dir/checkpoint-N`` file by file; a kill leaves half of it, which
`get_last_checkpoint` hands to the next run. While a save is going on, the folder that it writes to is another one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import sort_checkpoints

from hf_dpopt.common import collectives
from hf_dpopt.common.durable import check_renames, make_folder, move_into_place, remove, remove_folder
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.huggingface.storage_faults import found_by, open_log
from hf_dpopt.run import checkpoint
from hf_dpopt.run.journal import JOURNAL
from hf_dpopt.run.run import PrivateRun
from hf_dpopt.run.run_log import Found


class Checkpoints:
    """Saves of one trainer, and the choice of where it goes on.

    Args:
        args: its training arguments.

    Attributes:
        folder: folder in which the Trainer makes `checkpoint-N` now; None for its own, between saves.
        last_saved: step of the last save of this process.
    """

    def __init__(self, args: DPTrainingArguments):
        self._args = args
        self.folder: Path | None = None
        self.last_saved: int | None = None
        self._pushes: list[str] = []
        self._extra: Path | None = None  # the checkpoint that is there for the journal alone

    @property
    def _output_dir(self) -> Path:
        return Path(str(self._args.output_dir))  # which a notebook may set between two trainings

    # --- saving ---

    def save(
        self, write: Callable[[], None], output_dir: str, state: TrainerState, run: PrivateRun, *, is_extra: bool
    ) -> str | None:
        """Save a checkpoint whole; return its folder if the Trainer wanted to push it.

        Args:
            write: the stock save, which asks `folder` where to write, and leaves what it would push to `defer_push`.
            output_dir: folder in which the checkpoint will lie.
            state: the Trainer's.
            run: the run in progress.
            is_extra: whether it is there for the journal alone: the next save removes it, and it replaces none.

        Raises:
            DPConfigError: if the ledger was taken from under the run, or the filesystem cannot rename folders.
        """
        place = Path(output_dir) / f"checkpoint-{state.global_step}"
        unfinished, was_there, self._pushes = place.parent / checkpoint.UNFINISHED, place.exists(), []
        if self._args.should_save:
            make_folder(unfinished)
            remove(unfinished / place.name)  # of a save that failed in this process
        self.folder = unfinished
        try:
            write()
        finally:
            self.folder = None
        self._name_best(place, state)
        made, standing = unfinished / place.name, run.stand()

        def finish() -> None:
            self._finish(made, place, state, standing, adopts=not was_there)
            self._remove_older(unfinished, place, state, is_extra=is_extra)  # a kill before leaves a whole one

        run.ranks.same(finish)
        if self._args.should_save and not self._args.save_only_model:
            run.checkpoint_written(state.global_step)
        self.last_saved, self._extra = state.global_step, place if is_extra else None
        return str(place) if self._pushes else None

    def defer_push(self, folder: str) -> bool:
        """Whether a push has to wait for the end of the save."""
        if self.folder is not None:
            self._pushes.append(folder)
        return self.folder is not None

    def _name_best(self, place: Path, state: TrainerState) -> None:
        """Note the best checkpoint under the name that it will have, as the stock save does."""
        if not state.best_global_step or self._args.save_strategy == "no":
            return
        best = place.with_name(f"checkpoint-{state.best_global_step}")
        if best == place or best.exists():
            state.best_model_checkpoint = str(best)

    def _finish(
        self, made: Path, place: Path, state: TrainerState, standing: tuple[str, str, int], *, adopts: bool
    ) -> None:
        """Complete the checkpoint, and put it in its place."""
        state.save_to_json(str(made / "trainer_state.json"))  # with the name of the best checkpoint
        if adopts and place.is_dir():  # a subclass of the Trainer wrote a file there by name
            for path in place.iterdir():
                if not (made / path.name).exists():
                    path.rename(made / path.name)
        checkpoint.write_manifest(made, *standing)
        move_into_place(made, place)

    def _remove_older(self, unfinished: Path, place: Path, state: TrainerState, *, is_extra: bool) -> None:
        """Delete older checkpoints that are too many."""
        gone = [] if is_extra else surplus(place.parent, self._args.save_total_limit, state)
        _delete([*([self._extra] if self._extra not in (None, place) else []), *map(Path, gone)], unfinished)

    def drop_extra(self) -> None:
        """Remove the checkpoint that was there for the journal alone: the training has ended."""
        if self._extra is not None and self._args.should_save:
            _delete([self._extra], self._extra.parent / checkpoint.UNFINISHED)
        self._extra = None

    # --- going on ---

    def choose(self, asked: str | os.PathLike[str] | bool | None) -> tuple[str | None, bool]:
        """Choose the checkpoint that a run goes on from, the same on every rank.

        Args:
            asked: `resume_from_checkpoint` as `Trainer.train` takes it; True for the last whole one.

        Returns:
            Its folder, or None; and whether a run without one goes on from its initial weights: by its journal, or
            because it has not taken a step yet.

        Raises:
            DPConfigError: if the one that was asked for is torn or no folder, if torn ones are all there is, if none
                could be saved whole, or if a process does not see it.
        """
        if isinstance(asked, str):  # as a command line gives it
            asked = {"true": True, "false": False}.get(asked.lower(), asked)
        folder, goes_on = collectives.current_ranks().same(lambda: self._choose(asked))
        if folder is not None:
            _check_seen_by_all(Path(folder))
        return folder, goes_on

    def check_best(self, state: TrainerState, run: PrivateRun) -> None:
        """Refuse to load the best checkpoint at the end if its files are not those that were saved.

        Args:
            state: the Trainer's, which names it.
            run: the run in progress, whose log knows more than what lies on the disk.
        """
        if state.best_model_checkpoint is None:
            return
        # a file in output_dir names it: a resume reads the Trainer's state
        best = self._output_dir / Path(state.best_model_checkpoint).name
        state.best_model_checkpoint = str(best)

        def check() -> None:
            found = checkpoint.examine(best, run.ledger)
            if not found.is_whole:
                raise checkpoint.refuse(found)

        run.ranks.same(check)
        _check_seen_by_all(best)

    def _choose(self, asked: str | os.PathLike[str] | bool | None) -> tuple[str | None, bool]:
        """Choose as `choose`, on rank 0."""
        output_dir = self._output_dir
        if self._args.save_strategy != "no":
            check_renames(output_dir / checkpoint.UNFINISHED)
        if asked is None or asked is False:
            return None, False
        known = found_by(self._args)
        if known.known is not None:  # finish or remove what a killed run left, under its locks
            with open_log(self._args) as log:
                checkpoint.clean(output_dir, log.state)
            known = found_by(self._args)
        if asked is True:
            newest = self._newest(output_dir, known)
            if newest is None:
                return None, True
            found = newest
        else:
            found = checkpoint.examine(Path(str(asked)), known.known, needed=checkpoint.NEEDED)
            if not found.is_whole:
                raise checkpoint.refuse(found)
        with loading(str(found.folder)):
            TrainerState.load_from_json(str(found.folder / checkpoint.STATE))
        return str(found.folder), False

    def _newest(self, output_dir: Path, known: Found) -> checkpoint.Checkpoint | None:
        """The last whole checkpoint, None if none is needed; say which ones after it are skipped, and why."""
        last, skipped = checkpoint.last_whole(output_dir, known.known)
        if last is None:
            torn = "".join(f" {one.folder.name}: {'; '.join(one.reasons)}." for one in skipped)
            if skipped and not (output_dir / JOURNAL).is_dir():  # which may lead on from the initial weights
                raise DPConfigError(
                    f"There is no whole checkpoint in {output_dir} to resume from.{torn} Leave resume_from_checkpoint "
                    "out to start over; steps that were charged there stay charged."
                )
            say = logger.warning if skipped else logger.info
            say(f"No whole checkpoint is in {output_dir}.{torn} The run goes on from its initial weights.")
            return None
        for one in skipped:
            logger.warning(f"{one.folder.name} is skipped: {'; '.join(one.reasons)}. Resuming from {last.folder}.")
        return last


def _check_seen_by_all(folder: Path) -> None:
    """Refuse a checkpoint that rank 0 chose, and that another machine does not have; all ranks together."""
    sees = collectives.current_ranks().every(folder.is_dir)
    if not all(sees):
        raise DPConfigError(
            f"{folder} is not there on the machine of process {sees.index(False)}. Put output_dir where all see it."
        )


@contextlib.contextmanager
def loading(folder: str | None) -> Iterator[None]:
    """Say of a checkpoint that its files do not fit the run, or are none of their kind: somebody made others."""
    try:
        yield
    except (DPConfigError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if folder is None:
            raise
        raise DPConfigError(
            f"{folder} cannot be loaded ({type(error).__name__}: {error}). Its files were edited, or are those of "
            "another model or optimizer. Resume with the options of the run, or from another checkpoint."
        ) from error


def _delete(folders: Iterable[Path | None], by_way_of: Path) -> None:
    """Delete checkpoints; where that fails, as with files that are open on NFS, the next run deletes the rest."""
    for folder in filter(None, folders):
        try:
            remove_folder(folder, by_way_of)
        except OSError as error:
            logger.warning(f"{folder} could not be deleted ({error.strerror}); the next run tries again.")
    with contextlib.suppress(OSError):  # something of another save is left in it
        by_way_of.rmdir()


def surplus(output_dir: Path, limit: int | None, state: Any) -> list[str]:
    """Checkpoints that `save_total_limit` has no room for: those that the stock `rotate_checkpoints` would delete.

    Args:
        output_dir: folder that holds them.
        limit: `save_total_limit`; None or <= 0 for no limit.
        state: the Trainer's state, which names the best checkpoint.
    """
    if limit is None or limit <= 0:
        return []
    found = sort_checkpoints(str(output_dir), use_mtime=True)
    kept = set(found[-1:])
    if state.best_model_checkpoint is not None:
        kept.add(str(Path(state.best_model_checkpoint)))
    others = [folder for folder in found if folder not in kept]
    return others[: max(0, len(found) - limit)]
