"""Release of a run: what is written to `output_dir/privacy`, and what may not leave it."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import custom_object_save

from hf_dpopt.common import collectives
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import warn_once
from hf_dpopt.huggingface.preparation import tokenizer_of
from hf_dpopt.plan.meaning import meaning_of_plan
from hf_dpopt.plan.record import PlanRecord
from hf_dpopt.plan.vetting import unvetted_stages
from hf_dpopt.randomness.cipher import FastGaussian
from hf_dpopt.report.facts import RunFacts, collect_versions
from hf_dpopt.report.model_card import add_privacy_section, strip_training_losses
from hf_dpopt.report.release_scan import ALLOWED_NAMES, LINK, UNCHECKED, refuse_release, scan_for_secrets
from hf_dpopt.report.report import read_report, write_report
from hf_dpopt.run.checkpoint import UNPUBLISHED
from hf_dpopt.run.dataset_ledger import charged_to
from hf_dpopt.run.keys import private_dir
from hf_dpopt.run.log import Found, RunLog, find_run

WEIGHTS = (".safetensors", ".bin", ".index.json")  # ends of the names of weights and adapters
CONFIGURATIONS = ("config.json", "adapter_config.json", "generation_config.json")
NO_WEIGHTS = ("training_args.bin",)


class ReleaseGuard:
    """Report, model card and release scan of one trainer."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self._released: dict[str, str] = {}

    def charged(self) -> Sequence[int]:
        """Charged steps of each chain: of the run in progress, else of its log, else of the ledger, else none."""
        if self.trainer._run is not None:
            return self.trainer._run.charged
        known = self._found().known
        return known.charged if known else ()

    def _found(self) -> Found:
        """Return what is known of the run, after writing its ledger anew where a log here knows more."""
        output_dir, given = Path(self.trainer.args.output_dir), self.trainer.args.private_state_dir
        found, run = find_run(output_dir, private_dir(given, output_dir, is_read=True)), self.trainer._run
        is_open = run is not None and run.log is not None  # and writes the ledger itself
        if found.num_unknown and not is_open and self.trainer.is_world_process_zero():
            RunLog.open(output_dir, private_dir(given, output_dir)).close()
            found = find_run(output_dir, private_dir(given, output_dir, is_read=True))
        return found

    def facts(self) -> RunFacts:
        """Collect the facts that the report states now."""
        trainer, plan = self.trainer, self.trainer._planned()
        ledger = self._found().ledger
        if ledger is not None and trainer._run is None:  # a trainer that only publishes says what was run
            ledger.check_plan(plan.record.to_json(), must_match=PlanRecord.mechanism_fields())
        spent = trainer.privacy_spent()
        extras = (
            ["training loss, clip fraction and batch sizes, on the console"] if trainer.args.log_unprivatized else []
        )
        return RunFacts(
            plan=plan.record.to_json() | charged_to(ledger, trainer.args.dataset_budget()),
            epsilon_spent=spent.epsilon,
            epsilon_replace_one=self._replace_one(),
            delta=plan.delta,
            steps_charged=spent.num_steps,
            steps_planned=plan.num_steps,
            noise_generator=trainer._run.noise_generator_class if trainer._run else "none yet",
            secure=FastGaussian.stream not in plan.noise_generators(),
            chains=len(ledger.chains) if ledger else 0,
            steps_lost=ledger.num_lost if ledger else 0,
            world_size=collectives.world_size(),
            ledger_digest=ledger.digest() if ledger else "",
            self_check=trainer._self_check,
            unsafe=plan.config.unsafe_fixed_noise_key is not None
            or (ledger is not None and any(c.unsafe for c in ledger.chains)),
            non_private_outputs=tuple(extras),
            callbacks=trainer.user_callbacks(),
            after_noise=trainer.after_noise(),
            eval_data_privacy=trainer.args.eval_data_privacy,
            data_dependent_preprocessing=trainer.args.data_dependent_preprocessing,
            unit_declared=trainer.unit_declared,
            model_class=type(trainer.model).__name__,
            num_trainable=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
            versions=collect_versions(),
            released_files=self._released or self._released_before(),
            meaning=meaning_of_plan(plan, self.charged()),
            unvetted=unvetted_stages(plan),
            evaluations=trainer._private_evaluation.facts or {},
        )

    def _replace_one(self) -> float | None:
        """Epsilon under `replace_one` of the plan, or of the steps charged if they cost more."""
        plan = self.trainer._planned()
        if not plan.is_private:
            return math.inf
        planned, charged = plan.epsilon_replace_one(), plan.epsilon_replace_one(tuple(self.charged()))
        return None if planned is None or charged is None else max(planned, charged)

    def note_saved(self, folder: Path) -> None:
        """Take down the digests of weights and configurations that were saved to `output_dir`, and report them.

        The report of a trainer that trained nothing stays as it is, until it pushes.
        """
        if folder.resolve() != Path(self.trainer.args.output_dir).resolve():
            return  # a checkpoint, or a copy elsewhere
        self._released = digests_of_release(folder)
        if self.trainer._run is not None:
            self.write_report()

    def _released_before(self) -> dict[str, str]:
        """Digests in the report that lies there; none if there is no report that can be read."""
        try:
            return read_report(self.trainer.args.output_dir).released_files
        except DPConfigError:
            return {}

    def write_report(self) -> None:
        """Write `privacy/statement.md` and `privacy/report.json`; rank 0 only, and not without the run's ledger.

        Other machines have no ledger, and could not say how many keys were used (`save_on_each_node`).
        """
        run = self.trainer._run
        if run is not None and run.log is not None and not run.log.is_intact:
            return  # the run stops for it
        if self.trainer.is_world_process_zero() and self.trainer.plan is not None:
            write_report(self.trainer.args.output_dir, self.facts())

    def check(self, folder: Path, *, is_push: bool = False) -> None:
        """Refuse to continue if the folder holds a key, an un-noised value, or a file that no push may take.

        Args:
            folder: folder that was saved, or is about to be pushed.
            is_push: whether it is about to be pushed: every byte is read, and names that are not on the allow-list are
                refused. Else a link, or a file that cannot be read, is a warning: a save publishes nothing.

        Raises:
            DPConfigError: naming the files and what is in them.
        """
        if not self.trainer.args.should_save or not folder.exists():
            return
        args, run = self.trainer.args, self.trainer._run
        if run is not None:
            keys = run.secrets()
        else:  # another process trained: the keys it left behind
            found = find_run(Path(args.output_dir), private_dir(args.private_state_dir, args.output_dir, is_read=True))
            keys = [] if found.keys is None else found.keys.secrets()
        allowed = [*ALLOWED_NAMES, *self._names_saved_with_it()] if is_push else None
        findings = scan_for_secrets(folder, keys, allowed=allowed, unpublished=UNPUBLISHED, reads_everything=is_push)
        tolerated = () if is_push else (LINK, UNCHECKED)
        for finding in findings:
            if finding.kind in tolerated:
                warn_once(f"{folder}/{finding}", f"{finding}. This stops a push of {folder}, not the run.")
        refuse_release([finding for finding in findings if finding.kind not in tolerated])

    def _names_saved_with_it(self) -> list[str]:
        """Files of the tokenizer, and of the model's own code, that `save_pretrained` writes."""
        model, tokenizer = self.trainer.accelerator.unwrap_model(self.trainer.model), self.trainer.processing_class
        with tempfile.TemporaryDirectory() as folder:
            if hasattr(tokenizer, "save_pretrained"):
                tokenizer.save_pretrained(folder)
            if getattr(model, "_auto_class", None) is not None:
                custom_object_save(model, folder, config=copy.deepcopy(model.config))
            return [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()]

    def complete_model_card(self) -> None:
        """Take the un-noised values out of the Trainer's card and put the privacy section in."""
        path = Path(self.trainer.args.output_dir) / "README.md"
        if self.trainer.plan is None or not self.trainer.is_world_process_zero() or not path.is_file():
            return
        card = strip_training_losses(path.read_text(encoding="utf-8", errors="replace"))
        path.write_text(add_privacy_section(card, self.facts()), encoding="utf-8")


class TokenizerLengths:
    """Truncation and padding of tokenizers as they are now; every call leaves its own there, and they are saved.

    Args:
        *owners: tokenizers, processors or collators that have one, or anything else.
    """

    def __init__(self, *owners: Any):
        found = [getattr(owner, "backend_tokenizer", None) for one in owners for owner in (one, tokenizer_of(one))]
        self._backends = [backend for backend in found if backend is not None]
        self._start = self._now()

    @contextlib.contextmanager
    def saved(self) -> Iterator[None]:
        """Set the tokenizers to what was there at the start, inside the context."""
        now = self._now()
        self._set(self._start)
        try:
            yield
        finally:
            self._set(now)

    def _now(self) -> list[tuple[Any, Any]]:
        return [(backend.truncation, backend.padding) for backend in self._backends]

    def _set(self, lengths: list[tuple[Any, Any]]) -> None:
        for backend, (truncation, padding) in zip(self._backends, lengths, strict=True):
            backend.no_truncation()
            backend.no_padding()
            if truncation is not None:
                backend.enable_truncation(**truncation)
            if padding is not None:
                backend.enable_padding(**padding)


def digests_of_release(folder: Path) -> dict[str, str]:
    """SHA-256 of the weights, adapters and configurations of a folder, by name; read piece by piece."""
    found = {}
    for path in sorted(folder.iterdir()):
        is_named = path.name.endswith(WEIGHTS) or path.name in CONFIGURATIONS
        if is_named and path.name not in NO_WEIGHTS and path.is_file():
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
