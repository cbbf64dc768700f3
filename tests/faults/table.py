"""Faults that break the promise and leave the program running, each with the tests or the audit that have to find it."""

from __future__ import annotations

from tests.faults.plant import Fault

BUDGET = "tests/run/test_budget.py"
TRAINER = "tests/huggingface/test_trainer.py"
LOSSES = "tests/records/test_losses.py"
LOG = "tests/run/test_log.py"
REFUSED_MODELS = "tests/refusals/test_models.py"
SAMPLERS = "tests/sampling/test_samplers.py"
ROWS = "tests/adversary/test_rows_of_an_index.py"
COLLATORS = "tests/adversary/test_collators.py"
MALFORMED = "tests/adversary/test_malformed_records.py"
SECOND = "tests/adversary/test_second_attack.py"
EVALUATION = "tests/adversary/test_evaluation.py"
ROLLBACK = "tests/adversary/test_rollback.py"
NORMS = "tests/adversary/test_clipping_norms.py"
SELF_CHECK = "tests/adversary/test_self_check.py"
PADDING = "tests/adversary/test_padding.py"
OWN_LOSSES = "tests/adversary/test_own_losses.py"
ROPE = "tests/adversary/test_rope.py"
LEAVE_ONE_OUT = f"{TRAINER}::test_leave_one_out_through_the_trainer"


NU = {"noise_mechanism": "nu_dpftrl"}
USERS = {"privacy_unit": "user"}
CLOSE = {"noise_multiplier": 0.002}  # so little noise that what a record adds is seen to a thousandth of a clip
SCALE, TIME, SPACE = "noise: stddev", "noise: steps", "noise: coordinates"
CLIP, REST, SAMPLING = "a record adds", "a record is in", "sampling"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "the rows of an index are records of their own",
        "hf_dpopt/run/batches.py",
        "indices.of_rows([len(r) for r in rows]))",
        "indices)",
        (f"{ROWS}::test_a_record_of_several_rows_moves_the_sum_by_one_clip",),
    ),
    Fault(
        "the records of an index are handed out twice",
        "hf_dpopt/run/batches.py",
        "self._make([row for of_index in rows for row in of_index], indices",
        "self._make([row for of_index in rows for row in of_index] * 2, indices",
        (f"{TRAINER}::test_without_noise_a_step_is_the_clipped_sum_of_the_drawn_records",),
        CLIP,
    ),
    Fault(
        "a collator that nobody knows sees the whole batch",
        "hf_dpopt/records/collation.py",
        "if not self.sees_batches or not isinstance(record, Mapping):",
        "if not isinstance(record, Mapping):",
        (f"{COLLATORS}::test_a_collator_that_mixes_seldom_sees_single_records",),
    ),
    Fault(
        "the rows of a collator are not compared with its records",
        "hf_dpopt/records/collation.py",
        "    if num_records(batch) != num:\n",
        "    if False:\n",
        (f"{SECOND}::test_a_collator_that_makes_two_rows_of_a_record",),
    ),
    Fault(
        "the type of a column is that of the first record of the batch",
        "hf_dpopt/records/collation.py",
        "return None if self._masks_its_ends(record) else _types(record)",
        "return (dict,)",
        (f"{COLLATORS}::test_an_integer_label_does_not_truncate_the_fractions_of_others",),
    ),
    Fault(
        "a record that masks its own first tokens is collated beside others",
        "hf_dpopt/records/collation.py",
        "if not mask[0] or not is_flat(ids)",
        "if not is_flat(ids)",
        (f"{COLLATORS}::test_a_record_that_cannot_be_used_changes_no_row",),
    ),
    Fault(
        "padding without a mask is taken as it comes",
        "hf_dpopt/records/collation.py",
        'return "attention_mask" not in batch and',
        "return False and",
        ("tests/records/test_collation.py::test_a_known_collator_without_a_mask_is_not_believed",),
    ),
    Fault(
        "a step stops at a record that cannot be read",
        "hf_dpopt/records/rows.py",
        "    with SuppressRecordErrors():  # a run that stopped here",
        "    if True:  # a run that stopped here",
        (f"{MALFORMED}::test_a_record_that_cannot_be_read_adds_nothing",),
    ),
    Fault(
        "a step stops at a record that does not fit",
        "hf_dpopt/records/collation.py",
        "        with SuppressRecordErrors():\n            return self.fitted(record)",
        "        if True:\n            return self.fitted(record)",
        (f"{SECOND}::test_a_record_stops_no_step",),
    ),
    Fault(
        "values out of range reach the model",
        "hf_dpopt/records/collation.py",
        "        return not self.limits.is_too_wide(batch) and not bool(self.limits.failing(batch).any())\n",
        "        return not self.limits.is_too_wide(batch)\n",
        (f"{MALFORMED}::test_values_out_of_range_reach_no_forward",),
    ),
    Fault(
        "a step stops where the model fails on a record",
        "hf_dpopt/run/batches.py",
        "            raise _ForwardFailed from error",
        "            raise",
        (f"{MALFORMED}::test_a_record_on_which_the_model_fails_adds_nothing",),
    ),
    Fault(
        "malformed records are not looked for before training",
        "hf_dpopt/records/inspection.py",
        "    for i, row in _rows(dataset, limits):",
        "    for i, row in ():",
        (f"{MALFORMED}::test_a_malformed_record_of_a_list_is_told_before_training",),
    ),
    Fault(
        "blocks are trained on without a word",
        "hf_dpopt/records/unit.py",
        '    return Unlike("blocks", seen) if seen else None',
        "    return None",
        ("tests/records/test_unit.py::test_blocks_are_refused_until_the_unit_is_asked_for",),
    ),
    Fault(
        "copies of training rows are evaluated on",
        "hf_dpopt/records/overlap.py",
        "share_rows(dataset, self.dataset) or self._are_copied_in(dataset, share)",
        "share_rows(dataset, self.dataset)",
        (f"{EVALUATION}::test_training_records_are_not_evaluated_on",),
    ),
    Fault(
        "views of the training rows are evaluated on",
        "hf_dpopt/records/overlap.py",
        "share_rows(dataset, self.dataset) or self._are_copied_in(dataset, share)",
        "dataset is self.dataset",
        (f"{EVALUATION}::test_training_records_are_not_evaluated_on",),
    ),
    Fault(
        "a step is not written to the log beside its key",
        "hf_dpopt/run/run_log.py",
        "        self._log.append(*made)\n",
        '        self._log.append(*(one for one in made if one["kind"] != "step"))\n',
        (f"{ROLLBACK}::test_steps_that_the_ledger_has_forgotten_get_other_noise_and_are_charged",),
    ),
    Fault(
        "what the ledger alone knows is not charged",
        "hf_dpopt/run/run_log.py",
        "                made._take_in(other)\n",
        "                pass\n",
        (f"{LOG}::test_a_run_goes_on_with_its_key_only_from_where_it_stopped",),
    ),
    Fault(
        "a private folder that was put back keeps its key",
        "hf_dpopt/run/run_log.py",
        "            self.keys.destroy(chain.chain_id)\n",
        "            pass\n",
        (f"{LOG}::test_a_folder_put_back_alone",),
    ),
    Fault(
        "a resumed run may change what makes a gradient",
        "hf_dpopt/run/run.py",
        "keys = (*PlanRecord.mechanism_fields(), *([TRAINING] if compared else []))",
        "keys = PlanRecord.mechanism_fields()",
        (f"{ROLLBACK}::test_what_makes_a_gradient_is_the_same_after_a_resume",),
    ),
    Fault(
        "a resumed run keeps its key although later steps were charged",
        "hf_dpopt/run/resume.py",
        "    if chain.reached != step:\n",
        "    if False:\n",
        (f"{ROLLBACK}::test_steps_that_the_ledger_has_forgotten_get_other_noise_and_are_charged",),
    ),
    Fault(
        "a step is computed before it is on the disk",
        "hf_dpopt/common/chained.py",
        "os.strerror(errno.ENOSPC))\n        os.fsync(self._file)\n",
        "os.strerror(errno.ENOSPC))\n",
        (f"{ROLLBACK}::test_a_step_is_on_the_disk_before_the_model_sees_a_record_of_it",),
    ),
    Fault(
        "the default delta is 1/n",
        "hf_dpopt/accounting/delta.py",
        "    return below_margin and digit**10 * num_units**11 <= 10 ** (10 * power)",
        "    return digit * num_units <= 10**power",
        ("tests/accounting/test_delta.py::test_known_defaults",),
    ),
    Fault(
        "a clipping norm may vanish in float32",
        "hf_dpopt/common/checks.py",
        "    if not SMALLEST_CLIPPING_NORM <= value <= LARGEST_CLIPPING_NORM:\n",
        "    if not value <= LARGEST_CLIPPING_NORM:\n",
        (f"{NORMS}::test_norms_out_of_range_are_refused_wherever_they_are_given",),
    ),
    Fault(
        "dropout masks come from a seed of 32 bits",
        "hf_dpopt/randomness/framework.py",
        "    torch.set_rng_state(state)\n\n",
        "\n",
        ("tests/randomness/test_framework_rng.py::test_steps_whose_keys_share_32_bits_have_other_masks",),
    ),
    Fault(
        "dynamic rotary embeddings are looked for at the top of a config only",
        "hf_dpopt/records/settings.py",
        """                yield from _inside(inner, f"{path}{str(name).lstrip('_')}.", seen)\n""",
        "                pass\n",
        (f"{ROPE}::test_it_is_found_in_whatever_depth",),
    ),
    Fault(
        "the loss is divided by the tokens of the batch",
        "hf_dpopt/records/losses.py",
        "    num_targets_B = (labels_BT != IGNORED).sum(dim=1)\n"
        "    return losses_BT.sum(dim=1) / num_targets_B.clamp(min=1)",
        "    num_targets_B = (labels_BT != IGNORED).sum()\n"
        "    return losses_BT.sum(dim=1) / num_targets_B.clamp(min=1)",
        (f"{LOSSES}::test_label_smoothing_is_the_trainers_within_one_record",),
    ),
    Fault(
        "the fused loss is divided by the tokens of the batch",
        "hf_dpopt/records/losses.py",
        "ctx.labels_BT, ctx.num_targets_B = labels_BT, (labels_BT != IGNORED).sum(dim=1).clamp(min=1)",
        "ctx.labels_BT, ctx.num_targets_B = labels_BT, (labels_BT != IGNORED).sum().clamp(min=1).expand(len(labels_BT))",
        (f"{LOSSES}::test_a_long_record_in_the_batch_changes_no_other_loss",),
    ),
    Fault(
        "padding counts as a target",
        "hf_dpopt/records/losses.py",
        "return labels_BT.masked_fill(~counts_BT, IGNORED)",
        "return labels_BT",
        (f"{LOSSES}::test_labels_at_padding_do_not_count",),
    ),
    Fault(
        "an answer is looked for in the padding",
        "hf_dpopt/records/losses.py",
        "logits_BT = logits_BT.masked_fill(padding_BT, torch.finfo(logits_BT.dtype).min)",
        "pass",
        (f"{LOSSES}::test_a_long_record_in_the_batch_changes_no_other_loss",),
    ),
    Fault(
        "a record without a finite gradient is multiplied by zero",
        "hf_dpopt/clipping/book_keeping.py",
        "all_kept = bool(keep_B.all())",
        "all_kept, keep_B = True, keep_B | True\n        kept = {group: factors_B for group, factors_B in factors.items()}",
        (LEAVE_ONE_OUT,),
    ),
    Fault(
        "the clip is skipped",
        "hf_dpopt/clipping/thresholds.py",
        "return (bound / norms_B).clamp(max=1.0)",
        "return torch.ones_like(norms_B)",
        (LEAVE_ONE_OUT, "tests/grads/test_clipping.py::test_no_record_exceeds_the_bound"),
        CLIP,
    ),
    Fault(
        "the clip is taken layer by layer, each to the whole norm",
        "hf_dpopt/clipping/thresholds.py",
        "return self.clipping_norm / math.sqrt(num_groups)",
        "return self.clipping_norm",
        ("tests/grads/test_clipping.py::test_per_layer_bounds_the_whole_record",),
    ),
    Fault(
        "the sensitivity of replaced records is that of removed ones",
        "hf_dpopt/common/adjacency.py",
        '"replace_one": 2.0}',
        '"replace_one": 1.0}',
        ("tests/grads/test_clipping.py::test_neighbours_reach_the_sensitivity_and_not_more",),
    ),
    Fault(
        "the sum is divided by the records that were drawn",
        "hf_dpopt/run/step.py",
        "    released = run.release(joint, step)\n",
        "    released = run.release(joint, step)\n"
        "    for x in released.values():\n"
        "        x.mul_(run.plan.config.expected_batch_size / max(1, seen.num_records))\n",
        (f"{TRAINER}::test_without_noise_a_step_is_the_clipped_sum_of_the_drawn_records", LEAVE_ONE_OUT),
        SCALE,
    ),
    Fault(
        "a step without records releases no noise",
        "hf_dpopt/run/step.py",
        "    released = run.release(joint, step)\n",
        "    released = run.release(joint, step) if seen.num_records else joint\n",
        (f"{TRAINER}::test_a_noise_only_step_noises_every_coordinate",),
    ),
    Fault(
        "the noise is half as large",
        "hf_dpopt/noise/gaussian.py",
        "add_to(totals, stddev=self.draw_stddev, step=step",
        "add_to(totals, stddev=self.draw_stddev / 2, step=step",
        (f"{TRAINER}::test_noise_of_a_run_has_the_calibrated_scale",),
        SCALE,
    ),
    Fault(
        "the noise is drawn once and used in every step",
        "hf_dpopt/noise/gaussian.py",
        "add_to(totals, stddev=self.draw_stddev, step=step",
        "add_to(totals, stddev=self.draw_stddev, step=1",
        (f"{TRAINER}::test_a_noise_only_step_noises_every_coordinate",),
        TIME,
    ),
    Fault(
        "all tensors of a step get the noise of the first",
        "hf_dpopt/randomness/chacha.py",
        "normals.draw_range(key, parts[cut.part].tensor,",
        "normals.draw_range(key, parts[0].tensor,",
        ("tests/mechanisms/test_chacha.py::test_the_noise_is_added_to_sums_and_rounded_once",),
        SPACE,
    ),
    Fault(
        "the noise is a function of the step alone",
        "hf_dpopt/randomness/chacha.py",
        'self._key = derive_key(key, "chacha20 gaussian")',
        'self._key = derive_key(bytes(32), "chacha20 gaussian")',
        ("tests/mechanisms/test_randomness.py::test_streams_are_independent",),
    ),
    Fault(
        "the batches are blocks of a shuffled order, charged as Poisson ones",
        "hf_dpopt/sampling/poisson.py",
        "return np.concatenate([first + np.flatnonzero(words < self._threshold) for first, words in blocks])",
        "size = self.expected_batch_size\n"
        "        epoch, place = divmod(step - 1, self.num_examples // size)\n"
        "        order = np.random.default_rng([epoch, *key]).permutation(self.num_examples)\n"
        "        return np.sort(order[place * size : (place + 1) * size])",
        (f"{SAMPLERS}::test_records_are_independent_coins",),
        SAMPLING,
    ),
    Fault(
        "the draws of every step are those of the first",
        "hf_dpopt/sampling/poisson.py",
        "blocks = word_blocks(key, step, self.num_examples)",
        "blocks = word_blocks(key, 1, self.num_examples)",
        (f"{SAMPLERS}::test_keys_and_steps_matter",),
        SAMPLING,
    ),
    Fault(
        "training that starts over keeps its key",
        "hf_dpopt/run/resume.py",
        "    if step is None:\n",
        "    step = step or 0\n    if not ledger.chains:\n",
        (f"{LOG}::test_a_run_goes_on_with_its_key_only_from_where_it_stopped",),
    ),
    Fault(
        "a step may be charged twice",
        "hf_dpopt/run/run_log.py",
        "        if chain is not None and step <= chain.reached:",
        "        if False:",
        (f"{LOG}::test_a_step_is_charged_once",),
    ),
    Fault(
        "the self-check says yes to everything",
        "hf_dpopt/self_check/comparisons.py",
        "        if not errors[worst] <= self.tolerance:\n",
        "        if False:\n",
        ("tests/self_check/test_self_check.py::test_what_is_not_is_refused_by_name",),
    ),
    Fault(
        "the self-check leaves out the padding",
        "hf_dpopt/self_check/made_up_checks.py",
        "            if num_more:\n",
        "            if False:\n",
        ("tests/self_check/test_self_check.py::test_what_is_not_is_refused_by_name",),
    ),
    Fault(
        "the self-check runs in evaluation mode",
        "hf_dpopt/self_check/conditions.py",
        "        stack.enter_context(in_mode(model, training=True))\n",
        "        stack.enter_context(in_mode(model, training=False))\n",
        (f"{SELF_CHECK}::test_it_is_refused_before_the_first_step",),
    ),
    Fault(
        "draws that a batch shares are not looked for",
        "hf_dpopt/self_check/made_up_checks.py",
        "            _check_shared_draws(probe, batch)\n",
        "            pass\n",
        ("tests/self_check/test_self_check.py::test_what_is_not_is_refused_by_name",),
    ),
    Fault(
        "layers that normalise over the batch are let in",
        "hf_dpopt/huggingface/refusals/model.py",
        "isinstance(module, nn.modules.batchnorm._BatchNorm),",
        "False,",
        (f"{REFUSED_MODELS}::test_models",),
    ),
    Fault(
        "rotary embeddings that look at the longest record are let in",
        "hf_dpopt/huggingface/refusals/model.py",
        "        bool(rotary),\n",
        "        False,\n",
        (f"{ROPE}::test_it_is_found_in_whatever_depth",),
    ),
    Fault(
        "a call may cost 5 % more than its budget",
        "hf_dpopt/run/run.py",
        "        if spent <= target:\n            return",
        "        if spent <= target * 1.05:\n            return",
        (f"{BUDGET}::test_a_call_that_costs_a_little_more_than_its_budget_is_refused_before_a_step",),
    ),
    Fault(
        "between steps the generators keep the public seed",
        "hf_dpopt/huggingface/session.py",
        "        reseed_from_the_system()  #",
        "        pass  #",
        (f"{TRAINER}::test_what_is_drawn_between_steps_does_not_follow_from_the_public_seed",),
    ),
    Fault(
        "the system's seed reaches no generator",
        "hf_dpopt/randomness/framework.py",
        "    _seed_all(os.urandom(KEY_BYTES))",
        "    return",
        ("tests/randomness/test_framework_rng.py::test_the_system_s_seed_leaves_nothing_of_the_public_one",),
    ),
    Fault(
        "the exact loss is logged",
        "hf_dpopt/huggingface/trainer.py",
        "logs = {key: value for key, value in logs.items() if not is_secret_key(key)}\n        if",
        "if",
        (f"{TRAINER}::test_nothing_unprivatized_is_logged_or_saved",),
    ),
    Fault(
        "guessed padding: targets keep the token that the collator pads them with",
        "hf_dpopt/records/collation.py",
        "        return dataclasses.replace(collator, label_pad_token_id=IGNORED)\n",
        "        return collator\n",
        (f"{PADDING}::test_targets_padded_by_any_token",),
    ),
    Fault(
        "guessed padding: a record that is masked as a whole reaches the model",
        "hf_dpopt/records/limits.py",
        "dtype=torch.bool) | self.empty(batch)",
        "dtype=torch.bool)",
        (f"{PADDING}::test_a_record_that_attends_to_nothing_is_empty",),
    ),
    Fault(
        "guessed padding: a masked place of the decoder has a target",
        "hf_dpopt/records/losses.py",
        '            labels = without_padding(labels, batch.get("decoder_attention_mask"), shifted=False)\n',
        "",
        (f"{PADDING}::test_targets_at_masked_places_of_the_decoder",),
    ),
    Fault(
        "rounding excuses whatever others do to a record",
        "hf_dpopt/self_check/comparisons.py",
        "        return check(min(max(tolerance, FLOORS * _last_digits(engine, losses, batches)), MOST_BY_ROUNDING))\n",
        "        return check(1.0)\n",
        (f"{SELF_CHECK}::test_a_model_that_lets_padding_reach_some_records_is_refused",),
    ),
    Fault(
        "a loss function of the user is tried on made-up records alone",
        "hf_dpopt/huggingface/session.py",
        "        if self.losses.function and is_whole:",
        "        if False:",
        (f"{OWN_LOSSES}::test_one_that_mixes_records_is_named_first",),
    ),
    Fault(
        "no noise",
        "hf_dpopt/randomness/chacha.py",
        "np.multiply(z, stddev, ",
        "np.multiply(z, 0.0, ",
        finding=SCALE,
    ),
    Fault(
        "noise 5 % too small",
        "hf_dpopt/noise/gaussian.py",
        "add_to(totals, stddev=self.draw_stddev, step=step",
        "add_to(totals, stddev=0.95 * self.draw_stddev, step=step",
        finding=SCALE,
    ),
    Fault(
        "noise missing on one tensor",
        "hf_dpopt/randomness/chacha.py",
        "for tensor, total in flat.items()], stddev",
        "for tensor, total in flat.items() if tensor], stddev",
        finding=SCALE,
    ),
    Fault(
        "noise of step 17 that of step 5",
        "hf_dpopt/randomness/chacha.py",
        'derive_key(self._key, "step", str(step))',
        'derive_key(self._key, "step", str(5 if step == 17 else step))',
        finding=TIME,
    ),
    Fault(
        "noise uniform, of the same variance",
        "hf_dpopt/randomness/chacha.py",
        "return self.draw(key, tensor, block, end - block)[skipped : skipped + num]",
        "z = torch.from_numpy(self.draw(key, tensor, block, end - block)[skipped : skipped + num])\n"
        "        return ((torch.special.ndtr(z) - 0.5) * 12**0.5).numpy()",
        finding="noise: Gaussian",
    ),
    Fault(
        "noise cut at three standard deviations",
        "hf_dpopt/randomness/chacha.py",
        "return self.draw(key, tensor, block, end - block)[skipped : skipped + num]",
        "z = torch.from_numpy(self.draw(key, tensor, block, end - block)[skipped : skipped + num])\n"
        "        return (z.clamp(-3, 3) * 1.00075).numpy()",
        finding="noise: Gaussian",
    ),
    Fault(
        "clip too wide by a quarter",
        "hf_dpopt/clipping/thresholds.py",
        "return (bound / norms_B).clamp(max=1.0)",
        "return 1.25 * (bound / norms_B).clamp(max=1.0)",
        finding=CLIP,
    ),
    Fault(  # the records of the audit have orthogonal gradients
        "clip of a physical batch, not of its records",
        "hf_dpopt/clipping/thresholds.py",
        "return (bound / norms_B).clamp(max=1.0)",
        "return (bound / norms_B.square().sum().sqrt().expand_as(norms_B)).clamp(max=1.0)",
        finding=CLIP,
    ),
    Fault(  # norms and factors have eight bits
        "clip computed in bfloat16",
        "hf_dpopt/clipping/thresholds.py",
        "return (bound / norms_B).clamp(max=1.0)",
        "return (bound / norms_B.bfloat16()).clamp(max=1.0).float()",
        finding=CLIP,
        settings=CLOSE,
    ),
    Fault(
        "the loader shuffles, whatever was drawn",
        "hf_dpopt/run/batches.py",
        "return StepIndices(drawn.tolist(), step)",
        "return StepIndices(np.random.default_rng(step).choice(1000, len(drawn), replace=False).tolist(), step)",
        finding=REST,
    ),
    Fault(
        "records drawn 15 % too often",
        "hf_dpopt/sampling/poisson.py",
        "int(self.sample_rate * 2.0**64)",
        "int(1.15 * self.sample_rate * 2.0**64)",
        finding=SAMPLING,
    ),
    Fault(
        "correlated noise begun anew halfway, uncharged",
        "hf_dpopt/noise/streams.py",
        "        for tensor, name in enumerate(sorted(sums)):\n            if self._to_replay",
        "        if t == 8:\n"
        "            for name, value in vars(self).items():\n"
        "                if isinstance(value, dict) and name != '_shapes':\n"
        "                    setattr(self, name, type(value)())\n"
        "        for tensor, name in enumerate(sorted(sums)):\n            if self._to_replay",
        finding=TIME,
        settings=NU,
    ),
    Fault(
        "correlation forgotten: independent noise",
        "hf_dpopt/noise/streams.py",
        "            self._add_to(sums[name], name, tensor, t)\n        self._shapes",
        "            sums[name].add_(self._normal(sums[name], tensor, t), alpha=self.scale)\n        self._shapes",
        finding=TIME,
        settings=NU,
    ),
    Fault(  # a record goes on after its step
        "a filter between the clip and the noise",
        "hf_dpopt/run/step.py",
        "    released = run.release(joint, step)\n",
        "    kept = run.__dict__.setdefault('kept', {})\n"
        "    for name, total in joint.items():\n"
        "        kept[name] = total.add_(kept.get(name, torch.zeros_like(total)), alpha=0.5).clone()\n"
        "    released = run.release(joint, step)\n",
        finding=REST,
        settings=CLOSE,
    ),
    Fault(
        "a user's rows clipped one by one",
        "hf_dpopt/users/user_batches.py",
        "= tuple(sizes), weight, are_users",
        "= (1,) * len(records), weight, are_users",
        finding=CLIP,
        settings=USERS,
    ),
    Fault(
        "noise missing on one rank of two",
        "hf_dpopt/randomness/chacha.py",
        "np.multiply(z, stddev, ",
        "np.multiply(z, 0.0 if torch.distributed.get_rank() else stddev, ",
        finding=SCALE,
        num_ranks=2,
    ),
    Fault(
        "two ranks that each take all records",
        "hf_dpopt/run/batches.py",
        "return StepIndices(drawn.tolist(), step)",
        "return StepIndices(run.draw(step).tolist(), step)",
        finding=CLIP,
        num_ranks=2,
    ),
)
