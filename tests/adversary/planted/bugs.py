"""Bugs that break the promise and leave the program running, each with the tests that have to catch it."""

from __future__ import annotations

import dataclasses

TRAINER = "tests/test_trainer.py"
LOSSES = "tests/test_losses.py"
BATCHES = "tests/test_batches.py"
STATE = "tests/test_private_state.py"
LEDGER = "tests/accounting/test_ledger.py"
REFUSALS = "tests/test_refusals.py"
SAMPLERS = "tests/sampling/test_samplers.py"
LEAVE_ONE_OUT = f"{TRAINER}::test_leave_one_out_through_the_trainer"


@dataclasses.dataclass(frozen=True)
class Bug:
    """One change of the package.

    Args:
        what: the bug, in words.
        file: in which it is planted, from the root of the checkout.
        old: text that is there exactly once.
        new: what it becomes.
        caught_by: tests (pytest's names) of which one at least turns red.
    """

    what: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]


BUGS: tuple[Bug, ...] = (
    Bug(
        "the rows of a batch are not compared with its records",
        "hf_dpopt/batches.py",
        "if num_records(batch) != len(some):",
        "if False:",
        (f"{BATCHES}::test_a_row_is_a_record",),
    ),
    Bug(
        "the records of an index are handed out twice",
        "hf_dpopt/batches.py",
        "return self._make(list(records), indices)",
        "return self._make(list(records) * 2, indices)",
        (f"{TRAINER}::test_without_noise_a_step_is_the_clipped_sum_of_the_drawn_records",),
    ),
    Bug(
        "padding without a mask is taken as it comes",
        "hf_dpopt/batches.py",
        'if "attention_mask" not in batch and len({_length(record) for record in some}) > 1:',
        "if False:",
        (f"{BATCHES}::test_padding_without_a_mask_is_refused",),
    ),
    Bug(
        "the loss is divided by the tokens of the batch",
        "hf_dpopt/losses.py",
        "    num_targets_B = (labels_BT != IGNORED).sum(dim=1)\n"
        "    return losses_BT.sum(dim=1) / num_targets_B.clamp(min=1)",
        "    num_targets_B = (labels_BT != IGNORED).sum()\n"
        "    return losses_BT.sum(dim=1) / num_targets_B.clamp(min=1)",
        (f"{LOSSES}::test_label_smoothing_is_the_trainers_within_one_record",),
    ),
    Bug(
        "the fused loss is divided by the tokens of the batch",
        "hf_dpopt/losses.py",
        "ctx.labels_BT, ctx.num_targets_B = labels_BT, (labels_BT != IGNORED).sum(dim=1).clamp(min=1)",
        "ctx.labels_BT, ctx.num_targets_B = labels_BT, (labels_BT != IGNORED).sum().clamp(min=1).expand(len(labels_BT))",
        (f"{LOSSES}::test_a_long_record_in_the_batch_changes_no_other_loss",),
    ),
    Bug(
        "padding counts as a target",
        "hf_dpopt/losses.py",
        "return labels_BT.masked_fill(~counts_BT, IGNORED)",
        "return labels_BT",
        (f"{LOSSES}::test_labels_at_padding_do_not_count",),
    ),
    Bug(
        "an answer is looked for in the padding",
        "hf_dpopt/losses.py",
        "logits_BT = logits_BT.masked_fill(padding_BT, torch.finfo(logits_BT.dtype).min)",
        "pass",
        (f"{LOSSES}::test_a_long_record_in_the_batch_changes_no_other_loss",),
    ),
    Bug(
        "a record without a finite gradient is multiplied by zero",
        "hf_dpopt/grads/book_keeping.py",
        "all_kept = bool(keep_B.all())",
        "all_kept, keep_B = True, keep_B | True\n        kept = {group: factors_B for group, factors_B in factors.items()}",
        (LEAVE_ONE_OUT,),
    ),
    Bug(
        "the clip is skipped",
        "hf_dpopt/clipping.py",
        "return (bound / norms_B).clamp(max=1.0)",
        "return torch.ones_like(norms_B)",
        (LEAVE_ONE_OUT, "tests/test_clipping.py::test_no_record_exceeds_the_bound"),
    ),
    Bug(
        "the clip is taken layer by layer, each to the whole norm",
        "hf_dpopt/clipping.py",
        "return self.clipping_norm / math.sqrt(num_groups)",
        "return self.clipping_norm",
        ("tests/test_clipping.py::test_per_layer_bounds_the_whole_record",),
    ),
    Bug(
        "the sensitivity of replaced records is that of removed ones",
        "hf_dpopt/clipping.py",
        '"replace_one": 2.0}',
        '"replace_one": 1.0}',
        ("tests/test_clipping.py::test_neighbours_reach_the_sensitivity_and_not_more",),
    ),
    Bug(
        "the sum is divided by the records that were drawn",
        "hf_dpopt/step.py",
        "released = postprocess.mean_over_expected_batch(sums, run.plan.config.expected_batch_size)",
        "released = postprocess.mean_over_expected_batch(sums, max(1, seen.num_records))",
        (f"{TRAINER}::test_without_noise_a_step_is_the_clipped_sum_of_the_drawn_records", LEAVE_ONE_OUT),
    ),
    Bug(
        "a step without records releases no noise",
        "hf_dpopt/step.py",
        "    run.noise.add_(sums, step)\n",
        "    if seen.num_records:\n        run.noise.add_(sums, step)\n",
        (f"{TRAINER}::test_a_noise_only_step_noises_every_coordinate",),
    ),
    Bug(
        "the noise is half as large",
        "hf_dpopt/mechanisms/gaussian.py",
        "sums[name].add_(normal, alpha=self.draw_stddev)",
        "sums[name].add_(normal, alpha=self.draw_stddev / 2)",
        (f"{TRAINER}::test_noise_of_a_run_has_the_calibrated_scale",),
    ),
    Bug(
        "the noise is drawn once and used in every step",
        "hf_dpopt/mechanisms/gaussian.py",
        "normal = self._source.normal(sums[name].shape, step=step, tensor=tensor,",
        "normal = self._source.normal(sums[name].shape, step=1, tensor=tensor,",
        ("tests/mechanisms/test_gaussian.py::test_noise_is_that_of_the_source_by_sorted_name",),
    ),
    Bug(
        "all tensors of a step get the noise of the first",
        "hf_dpopt/mechanisms/gaussian.py",
        "step=step, tensor=tensor, device",
        "step=step, tensor=0, device",
        ("tests/mechanisms/test_gaussian.py::test_noise_is_that_of_the_source_by_sorted_name",),
    ),
    Bug(
        "the noise is a function of the step alone",
        "hf_dpopt/mechanisms/randomness.py",
        'self._key = derive_key(key, "secure gaussian")',
        'self._key = derive_key(bytes(32), "secure gaussian")',
        ("tests/mechanisms/test_randomness.py::test_streams_are_independent",),
    ),
    Bug(
        "the batches are blocks of a shuffled order, charged as Poisson ones",
        "hf_dpopt/sampling/poisson.py",
        "return np.flatnonzero(random_words(key, step, self.num_examples) < self._threshold).astype(np.int64)",
        "return np.sort(np.argsort(random_words(key, step, self.num_examples))[: self.expected_batch_size])",
        (f"{SAMPLERS}::test_records_are_independent_coins",),
    ),
    Bug(
        "the coins of every step are those of the first",
        "hf_dpopt/sampling/poisson.py",
        "random_words(key, step, self.num_examples) < self._threshold",
        "random_words(key, 1, self.num_examples) < self._threshold",
        (f"{SAMPLERS}::test_keys_and_steps_matter",),
    ),
    Bug(
        "a resumed run keeps its key although later steps were charged",
        "hf_dpopt/private_state.py",
        "if _reached(ledger, last) != resume_step:",
        "if False:",
        (f"{STATE}::test_a_run_goes_on_with_its_key_only_from_where_it_stopped",),
    ),
    Bug(
        "training that starts over keeps its key",
        "hf_dpopt/private_state.py",
        '        return "training started over"',
        '        return ""',
        (f"{STATE}::test_training_again_starts_a_new_chain",),
    ),
    Bug(
        "a step may be charged twice",
        "hf_dpopt/accounting/ledger.py",
        "if step <= reached:",
        "if False:",
        (f"{LEDGER}::test_a_step_is_charged_once",),
    ),
    Bug(
        "a step is computed before it is on the disk",
        "hf_dpopt/accounting/ledger.py",
        "            os.fsync(self._file)\n            self._apply(",
        "            self._apply(",
        (f"{LEDGER}::test_a_charge_is_on_the_disk_when_it_returns",),
    ),
    Bug(
        "the self-check says yes to everything",
        "hf_dpopt/grads/self_check.py",
        "    if not errors[worst] <= tolerance:\n",
        "    if False:\n",
        ("tests/grads/test_self_check.py::test_a_loss_that_mixes_records",),
    ),
    Bug(
        "the self-check leaves out the padding",
        "hf_dpopt/grads/self_check.py",
        'if padding_id is not None and "input_ids" in batch:',
        "if False:",
        ("tests/grads/test_self_check.py::test_a_model_that_attends_to_padding",),
    ),
    Bug(
        "layers that normalise over the batch are let in",
        "hf_dpopt/refusals/model.py",
        "isinstance(module, nn.modules.batchnorm._BatchNorm),",
        "False,",
        (f"{REFUSALS}::test_models",),
    ),
    Bug(
        "rotary embeddings that look at the longest record are let in",
        "hf_dpopt/refusals/model.py",
        "        bool(rotary),\n",
        "        False,\n",
        (f"{REFUSALS}::test_rotary_embeddings_that_depend_on_the_batch",),
    ),
    Bug(
        "the exact loss is logged",
        "hf_dpopt/trainer.py",
        "logs = {key: value for key, value in logs.items() if key not in UNPRIVATIZED_LOGS}\n        if",
        "if",
        (f"{TRAINER}::test_nothing_unprivatized_is_logged_or_saved",),
    ),
)
