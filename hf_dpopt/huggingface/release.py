"""Release of a run: what is written to `output_dir/privacy`, and what may not leave it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_dpopt.common import collectives
from hf_dpopt.plan.plan import RESUME_KEYS
from hf_dpopt.randomness.cipher import SecureGaussian
from hf_dpopt.report.facts import RunFacts, collect_versions
from hf_dpopt.report.model_card import add_privacy_section, strip_training_losses
from hf_dpopt.report.release_scan import refuse_release, scan_for_secrets
from hf_dpopt.report.report import write_report
from hf_dpopt.run.keys import PrivateState, default_private_dir
from hf_dpopt.run.ledger import Ledger
from hf_dpopt.run.run import LEDGER

SCRUBBED = ("hub_token", "unsafe_fixed_noise_key", "private_state_dir")


class ReleaseGuard:
    """Report, model card and release scan of one trainer."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def charged(self) -> Sequence[int]:
        """Charged steps of each chain: of the run in progress, else of the ledger on disk, else none."""
        ledger = self._ledger()
        if self.trainer._run is not None:
            return self.trainer._run.charged
        return ledger.charged if ledger else ()

    def _ledger(self) -> Ledger | None:
        path = Path(self.trainer.args.output_dir) / LEDGER
        return Ledger.read(path) if path.exists() else None

    def facts(self) -> RunFacts:
        """Collect the facts that the report states now."""
        trainer, plan = self.trainer, self.trainer._planned()
        ledger = self._ledger()
        if ledger is not None and trainer._run is None:  # a trainer that only publishes says what was run
            ledger.check_plan(plan.public_dict(), must_match=RESUME_KEYS)
        spent = trainer.privacy_spent()
        extras = (
            ["training loss, clip fraction and batch sizes, on the console"] if trainer.args.log_unprivatized else []
        )
        return RunFacts(
            plan=plan.public_dict(),
            epsilon_spent=spent.epsilon,
            epsilon_replace_one=self._replace_one(),
            delta=plan.delta,
            steps_charged=spent.num_steps,
            steps_planned=plan.num_steps,
            noise_generator=trainer._run.noise_generator_class if trainer._run else "none yet",
            secure=all(name == SecureGaussian.name for name in plan.noise_generators()),
            chains=len(ledger.chains) if ledger else 0,
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
            printed_rows=trainer.printed_rows,
            model_class=type(trainer.model).__name__,
            num_trainable=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
            versions=collect_versions(),
        )

    def _replace_one(self) -> float | None:
        """Epsilon under `replace_one` of the plan, or of the steps charged if they cost more."""
        plan = self.trainer._planned()
        if not plan.is_private:
            return math.inf
        planned, charged = plan.epsilon_replace_one(), plan.epsilon_replace_one(tuple(self.charged()))
        return None if planned is None or charged is None else max(planned, charged)

    def write_report(self) -> None:
        """Write `privacy/statement.md` and `privacy/report.json`; rank 0 only."""
        if self.trainer.args.should_save and self.trainer.plan is not None:
            write_report(self.trainer.args.output_dir, self.facts())

    @contextlib.contextmanager
    def scrubbed_arguments(self) -> Iterator[None]:
        """`training_args.bin` pickles the arguments: without tokens, keys and the place of the keys."""
        args = self.trainer.args
        saved = {name: getattr(args, name) for name in SCRUBBED}
        for name in SCRUBBED:
            setattr(args, name, None)
        try:
            yield
        finally:
            for name, value in saved.items():
                setattr(args, name, value)

    def check(self, folder: Path) -> None:
        """Refuse to go on if a secret is in the folder.

        Raises:
            DPConfigError: naming the files and what is in them.
        """
        if not self.trainer.args.should_save or not folder.exists():
            return
        args, run = self.trainer.args, self.trainer._run
        if run is not None:
            keys = run.state.secrets() if run.state is not None else []
        else:  # another process trained: the keys it left behind
            directory = Path(args.private_state_dir or default_private_dir(args.output_dir))
            keys = PrivateState(directory, forbidden=args.output_dir).secrets() if directory.exists() else []
        refuse_release(scan_for_secrets(folder, keys))

    def complete_model_card(self) -> None:
        """Take the un-noised values out of the Trainer's card and put the privacy section in."""
        path = Path(self.trainer.args.output_dir) / "README.md"
        if self.trainer.plan is None or not self.trainer.is_world_process_zero() or not path.exists():
            return
        card = strip_training_losses(path.read_text(encoding="utf-8"))
        path.write_text(add_privacy_section(card, self.facts()), encoding="utf-8")
