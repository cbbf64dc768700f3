"""Release of a run: what is written to `output_dir/privacy`, and what may not leave it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import extract_model_from_parallel
from transformers import TrainerCallback
from transformers.dynamic_module_utils import custom_object_save
from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback, ProgressCallback

from hf_dpopt.common import collectives
from hf_dpopt.common.disk_faults import naming
from hf_dpopt.common.durable import remove_links
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import warn_once
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.huggingface.evaluation import EvaluationGuard
from hf_dpopt.huggingface.planning import PlannedRun, to_train
from hf_dpopt.huggingface.session import TrainingSession
from hf_dpopt.huggingface.storage_faults import found_by, open_log
from hf_dpopt.noise import MECHANISMS, NoiseStrategy
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.plan.privacy_profile import meaning_of_plan
from hf_dpopt.plan.record import PlanRecord
from hf_dpopt.records.collation import tokenizer_of
from hf_dpopt.report.facts import RunFacts, collect_versions
from hf_dpopt.report.model_card import add_privacy_section, strip_training_losses
from hf_dpopt.report.release_scan import ALLOWED_NAMES, LINK, UNCHECKED, refuse_release, scan_for_secrets
from hf_dpopt.report.report import read_report, write_report
from hf_dpopt.run.checkpoint import UNPUBLISHED
from hf_dpopt.run.dataset_ledger import charged_to
from hf_dpopt.run.run import PrivacySpent, spent_for
from hf_dpopt.run.run_log import Found

WEIGHTS = (".safetensors", ".bin", ".index.json")  # ends of the names of weights and adapters
CONFIGURATIONS = ("config.json", "adapter_config.json", "generation_config.json")
NO_WEIGHTS = ("training_args.bin",)
PACKAGE = __name__.split(".")[0]  # stages from elsewhere have no proof and no test here


@dataclasses.dataclass(frozen=True)
class ReleaseGuard:
    """Report, model card and release scan of a trainer as it is now.

    Args:
        args: training arguments.
        planned: what was planned; None for a trainer that only evaluates.
        session: the training in progress, or the last one; None before.
        model: the model, with what is wrapped around it for training.
        processing_class: the Trainer's.
        callbacks: the Trainer's.
        evaluation: evaluations so far.
    """

    args: DPTrainingArguments
    planned: PlannedRun | None
    session: TrainingSession | None
    model: Any
    processing_class: Any
    callbacks: Sequence[TrainerCallback]
    evaluation: EvaluationGuard

    @property
    def output_dir(self) -> Path:
        """Folder that is published."""
        return Path(str(self.args.output_dir))

    @contextlib.contextmanager
    def writing(self, folder: Path | None = None) -> Iterator[None]:
        """Write to a folder that errors name; links that somebody made in the output folder do not lead out of it."""
        folder = folder or self.output_dir
        if self.args.should_save and folder == self.output_dir:
            remove_links(folder)
        with naming(folder):
            yield

    def spent(self) -> PrivacySpent:
        """Privacy charged so far in the ledger of this output_dir, over all resumes, branches and calls to `train`.

        Raises:
            DPConfigError: if nothing was planned.
        """
        return spent_for(to_train(self.planned).plan, self.charged())

    def charged(self) -> Sequence[int]:
        """Charged steps of each chain: of the run in progress, else of its log, else of the ledger, else none."""
        if self.session is not None:
            return self.session.run.charged
        known = self._found().known
        return known.charged if known else ()

    def _found(self) -> Found:
        """Return what is known of the run, after writing its ledger anew where a log here knows more."""
        found = found_by(self.args)
        is_open = self.session is not None and self.session.run.log is not None  # and writes the ledger itself
        if found.num_unknown and not is_open and collectives.rank() == 0:
            open_log(self.args).close()
            found = found_by(self.args)
        return found

    def facts(self, released: Mapping[str, str] | None = None) -> RunFacts:
        """Collect the facts that the report states now.

        Args:
            released: digests of the files that were just saved; None for those of the report that lies there.
        """
        args, planned, session, known = self.args, to_train(self.planned), self.session, self._found()
        plan = planned.plan
        ledger = known.ledger
        if ledger is not None and session is None:  # a trainer that only publishes says what was run
            ledger.check_plan(plan.record.to_json(), must_match=PlanRecord.mechanism_fields())
        spent, charged = self.spent(), tuple(self.charged())
        printed = "training loss, clip fraction and batch sizes, on the console"
        return RunFacts(
            plan=plan.record.to_json() | charged_to(ledger, args.dataset_budget()),
            epsilon_spent=spent.epsilon,
            epsilon_replace_one=_replace_one(plan, charged),
            delta=plan.delta,
            steps_charged=spent.num_steps,
            steps_planned=plan.num_steps,
            chains=len(ledger.chains) if ledger else 0,
            steps_lost=ledger.num_lost if ledger else 0,
            world_size=collectives.world_size(),
            ledger_digest=ledger.digest() if ledger else "",
            self_check="not run" if session is None else session.self_check,
            unsafe=plan.config.unsafe_fixed_noise_key is not None
            or (ledger is not None and any(c.unsafe for c in ledger.chains)),
            non_private_outputs=(printed,) if args.log_unprivatized else (),
            callbacks=self.user_callbacks(),
            after_noise=() if session is None else tuple(session.stages.made_of),
            eval_data_privacy=args.eval_data_privacy,
            data_dependent_preprocessing=args.data_dependent_preprocessing,
            unit_declared=(args.rows_are_records and plan.unit == "example") or None,
            model_class=type(self.model).__name__,
            num_trainable=sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            versions=collect_versions(),
            released_files=dict(released or self._released_before()),
            meaning=meaning_of_plan(plan, charged),
            unvetted=unvetted_stages(plan),
            evaluations=self.evaluation.facts,
        )

    def user_callbacks(self) -> tuple[str, ...]:
        """Callbacks beyond the Trainer's own: they see the model between steps, so the report names them."""
        stock = (DefaultFlowCallback, PrinterCallback, ProgressCallback)
        return tuple(type(c).__name__ for c in self.callbacks if type(c) not in stock)

    def note_saved(self, folder: Path) -> None:
        """Check what was saved; report the digests of weights and configurations that were saved to `output_dir`.

        The report of a trainer that trained nothing stays as it is, until it pushes.

        Raises:
            DPConfigError: see `check`.
        """
        self.check(folder)
        if not self.args.should_save:
            return
        if self.session is not None and folder.resolve() == self.output_dir.resolve():  # not a checkpoint, or a copy
            self.write_report(digests_of_release(folder))

    def _released_before(self) -> dict[str, str]:
        """Digests in the report that lies there; none if there is no report that can be read."""
        try:
            return read_report(self.output_dir).released_files
        except DPConfigError:
            return {}

    def write_report(self, released: Mapping[str, str] | None = None) -> None:
        """Write `privacy/statement.md` and `privacy/report.json`; rank 0 only, and not without the run's ledger.

        Args:
            released: see `facts`.
        """
        log = None if self.session is None else self.session.run.log
        if log is not None and not log.is_intact:
            return  # the run stops for it
        if collectives.rank() == 0 and self.planned is not None:
            write_report(self.output_dir, self.facts(released))

    def publish(self, saved: Path | None = None) -> None:
        """Bring the report up to date, and refuse what no push may take.

        Args:
            saved: checkpoint whose files the push copies to `output_dir` first; None for those that are there.

        Raises:
            DPConfigError: see `check`.
        """
        self.write_report(digests_of_release(saved or self.output_dir))
        self.check(self.output_dir, is_push=True)

    def check(self, folder: Path, *, is_push: bool = False) -> None:
        """Refuse to continue if the folder holds a key, an un-noised value, or a file that no push may take.

        Args:
            folder: folder that was saved, or is about to be pushed.
            is_push: whether it is about to be pushed: every byte is read, and names that are not on the allow-list are
                refused. Else a link, or a file that cannot be read, is a warning: a save publishes nothing.

        Raises:
            DPConfigError: naming the files and what is in them.
        """
        if not self.args.should_save or not folder.exists():
            return
        if self.session is not None:
            keys = self.session.run.secrets()
        else:  # another process trained: the keys it left behind
            found = found_by(self.args).keys
            keys = [] if found is None else found.secrets()
        allowed = [*ALLOWED_NAMES, *self._names_saved_with_it()] if is_push else None
        findings = scan_for_secrets(folder, keys, allowed=allowed, unpublished=UNPUBLISHED, reads_everything=is_push)
        tolerated = () if is_push else (LINK, UNCHECKED)
        for finding in findings:
            if finding.kind in tolerated:
                warn_once(f"{folder}/{finding}", f"{finding}. This stops a push of {folder}, not the run.")
        refuse_release([finding for finding in findings if finding.kind not in tolerated])

    def _names_saved_with_it(self) -> list[str]:
        """Files of the tokenizer, and of the model's own code, that `save_pretrained` writes."""
        model = extract_model_from_parallel(self.model)
        with tempfile.TemporaryDirectory() as folder:
            if hasattr(self.processing_class, "save_pretrained"):
                self.processing_class.save_pretrained(folder)
            if getattr(model, "_auto_class", None) is not None:
                custom_object_save(model, folder, config=copy.deepcopy(model.config))
            return [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()]

    def complete_model_card(self) -> None:
        """Take the un-noised values out of the Trainer's card and put the privacy section in."""
        path = self.output_dir / "README.md"
        if self.planned is None or collectives.rank() != 0 or not path.is_file():
            return
        card = strip_training_losses(path.read_text(encoding="utf-8", errors="replace"))
        path.write_text(add_privacy_section(card, self.facts()), encoding="utf-8")


def _replace_one(plan: PrivacyPlan, charged: tuple[int, ...]) -> float | None:
    """Epsilon under `replace_one` of the plan, or of the steps charged if they cost more."""
    if not plan.is_private:
        return math.inf
    planned, spent = plan.epsilon_replace_one(), plan.epsilon_replace_one(charged)
    return None if planned is None or spent is None else max(planned, spent)


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
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_named = path.name.endswith(WEIGHTS) or path.name in CONFIGURATIONS
        if is_named and path.name not in NO_WEIGHTS and path.is_file():
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def unvetted_stages(plan: PrivacyPlan) -> tuple[str, ...]:
    """Stages between a record and the noise whose code lies outside the package, as "kind name".

    A stage is known by the module that its class, or the function that makes it, was defined in. A class of the
    package with options of the user's (coefficients of a strategy, say) is vetted: its proof holds for all of them.
    """
    mechanism = MECHANISMS.get(plan.config.noise_mechanism)
    parts: list[tuple[str, str, Any]] = [
        ("sampler", plan.sampler.name, type(plan.sampler)),
        ("clipping rule", plan.config.clipping, type(plan.clipper)),
        ("preconditioner", plan.preclip.name, type(plan.preclip)),
        *(("noise strategy", part.name, type(part)) for part in _parts(plan.strategy)),
        *([] if mechanism is None else [("noise mechanism", mechanism.name, mechanism.tune)]),
        *(("sampler of an earlier run", run.release.sampler.name, type(run.release.sampler)) for run in plan.earlier),
    ]
    return tuple(dict.fromkeys(f"{kind} {name}" for kind, name, made_by in parts if not _is_ours(made_by)))


def _parts(strategy: NoiseStrategy) -> Iterator[NoiseStrategy]:
    """Yield a strategy and those that it is built of."""
    yield strategy
    for value in vars(strategy).values():
        if isinstance(value, NoiseStrategy):
            yield from _parts(value)


def _is_ours(made_by: Any) -> bool:
    """Whether a class, and all that it inherits from, or a function is defined in the package."""
    kinds = made_by.__mro__ if isinstance(made_by, type) else (made_by,)
    modules = [str(getattr(kind, "__module__", "")).split(".")[0] for kind in kinds]
    return all(module in (PACKAGE, "abc", "builtins", "typing", "torch") for module in modules)
