"""Verdicts on mutants that survived.

same: it behaves as the package does.
harmless: it behaves otherwise, and no promise depends on it.
matters: a promise depends on it; the reason names the test that kills it now, or says why there is none yet.
"""

from __future__ import annotations

from typing import Any

Key = tuple[str, str, str, str, int, int]  # file, function, text of the line, operator, column, nth alike


def key_of(row: dict[str, Any]) -> Key:
    """What a row of the results is called here."""
    return row["file"], row["function"], row["text"], row["operator"], row["column"], row["nth"]


VERDICTS: dict[Key, tuple[str, str]] = {
    (
        "hf_dpopt/run/run.py",
        "PrivateRun.__init__",
        "self.noise.continue_at(self.charged[-1], noise_state)",
        "core/NumberReplacer",
        37,
        1,
    ): (
        "matters",
        "A second chain that is resumed goes on at its own step: `test_run.py::test_a_second_chain_that_is_resumed_goes_on_with_its_own_noise`",
    ),
    (
        "hf_dpopt/accounting/last_iterate.py",
        "plateau",
        'raise DPConfigError(f"decay={run.decay:g}: noise of small steps hides less, and no plateau is reached. Use 0.")',
        "DropStatement",
        0,
        0,
    ): (
        "matters",
        "The nearest tests were not those that see it, which was the choice of tests; the suite did: `test_last_iterate.py::test_the_plateau`",
    ),
    (
        "hf_dpopt/run/keys.py",
        "_beginnings",
        "return [first.numpy().tobytes()] if len(first) >= 8 and first.unique().numel() > 1 else []",
        "core/NumberReplacer",
        50,
        0,
    ): (
        "harmless",
        "From which size on a tensor is told apart from chance, 8 numbers or 9, is a choice",
    ),
    (
        "hf_dpopt/run/run.py",
        "recorded_plan",
        'if keeps_budget and plan is not None and plan["noise_multiplier"] == 0:',
        "core/AddNot",
        3,
        0,
    ): (
        "matters",
        "`test_run.py::test_a_budget_is_not_kept_on_top_of_steps_without_noise`",
    ),
    (
        "hf_dpopt/noise/finite_time.py",
        "_last_weights",
        "sizes = np.asarray(workload.step_sizes) / max(workload.step_sizes)",
        "core/ReplaceBinaryOperator_Div_Mul",
        40,
        0,
    ): (
        "matters",
        "Tuning for the last iterate took the unit of the learning rate: `test_finite_time.py::test_learning_rates_have_any_unit`",
    ),
    (
        "hf_dpopt/accounting/random_allocation.py",
        "",
        "KEPT = 12  # trees to which a third level is tried",
        "core/NumberReplacer",
        7,
        0,
    ): (
        "harmless",
        "How far trees are searched: every tree gives a valid bound",
    ),
    (
        "hf_dpopt/plan/options.py",
        "AfterNoiseOptions",
        'public_batch_size: int = option(32, "Records of public_dataset in one public gradient.")',
        "core/NumberReplacer",
        32,
        1,
    ): (
        "harmless",
        "The nearest tests were not those that see it, which was the choice of tests; the suite did: `test_options.py::test_the_page_is_current`",
    ),
    (
        "hf_dpopt/run/run.py",
        "PrivateRun._check_checkpoint",
        "mark = Path(checkpoint) / CHECKPOINT_MARK",
        "core/ReplaceBinaryOperator_Div_Mul",
        24,
        0,
    ): (
        "matters",
        "A resume ends in a raw error; dearer tests see it, now a cheap one, too: `test_run.py::test_a_checkpoint_that_the_ledger_does_not_know_is_refused_before_a_step`",
    ),
    (
        "hf_dpopt/noise/workloads.py",
        "momentum_workload",
        "if sizes.shape != (n,) or not np.isfinite(sizes).all() or (sizes < 0).any() or not sizes.any():",
        "core/NumberReplacer",
        67,
        1,
    ): (
        "matters",
        "`test_strategies.py::test_bad_parameters`, with learning rates of -0.5",
    ),
    (
        "hf_dpopt/accounting/random_allocation.py",
        "_inside",
        "for n in (2, 3, 4, 6, 8):",
        "core/ZeroIterationForLoop",
        9,
        0,
    ): (
        "harmless",
        "Fewer trees are searched, and every tree gives a valid bound; killed all the same: `test_random_allocation.py::test_blocks_within_blocks_are_tighter_where_noise_is_correlated`",
    ),
    ("hf_dpopt/run/step.py", "clip_and_sum", "*,", "core/ReplaceBinaryOperator_Mul_Div", 0, 0): (
        "same",
        "All callers pass these arguments by name",
    ),
    (
        "hf_dpopt/plan/users.py",
        "UserPlans.advice",
        "alike, apart = 1.0, 1 / math.sqrt(self.records_per_user)",
        "core/NumberReplacer",
        15,
        0,
    ): (
        "harmless",
        "A line of advice; killed all the same: `test_planning.py::test_the_advice_turns_where_records_are_alike_and_where_they_have_nothing_in_common`",
    ),
    ("hf_dpopt/run/run.py", "recorded_plan", "raise DPConfigError(", "DropStatement", 0, 0): (
        "matters",
        "`test_run.py::test_a_ledger_that_does_not_say_how_the_noise_was_correlated_is_not_continued`",
    ),
    (
        "hf_dpopt/run/run.py",
        "PrivateRun._check_checkpoint",
        "if not resume_step or checkpoint is None:",
        "core/ReplaceOrWithAnd",
        19,
        0,
    ): (
        "matters",
        "A resume whose caller answers for the checkpoint ends in a raw error: `test_run.py::test_a_second_chain_that_is_resumed_goes_on_with_its_own_noise`",
    ),
    (
        "hf_dpopt/sampling/balls_in_bins.py",
        "BallsInBinsSampler.certify",
        "_announce(num_samples)",
        "DropStatement",
        0,
        0,
    ): (
        "harmless",
        "A line of log: `test_samplers.py::test_a_verification_that_takes_time_is_announced`",
    ),
    (
        "hf_dpopt/noise/tree.py",
        "_worst_pattern.search",
        "for block in range(earliest // s, len(hits)):",
        "core/ReplaceBinaryOperator_FloorDiv_RShift",
        28,
        0,
    ): (
        "same",
        "`x >> s` is at most `x // s`, and blocks that lie before the place are skipped in the loop",
    ),
    (
        "hf_dpopt/accounting/last_iterate.py",
        "",
        "MANY = 10**12  # steps, for a run without end",
        "core/NumberReplacer",
        11,
        0,
    ): (
        "harmless",
        "Both stand for a run without end: the bound is flat there",
    ),
    (
        "hf_dpopt/run/keys.py",
        "default_private_dir",
        "name = hashlib.blake2b(os.fsencode(real), digest_size=16).hexdigest()",
        "core/NumberReplacer",
        54,
        0,
    ): (
        "matters",
        "Keys of a run that goes on would not be found: `test_private_state.py::test_the_name_of_the_default_directory_does_not_change`",
    ),
    (
        "hf_dpopt/sampling/balls_in_bins.py",
        "BallsInBinsSampler.steps_for_log",
        "if num_steps > planned:",
        "core/ReplaceComparisonOperator_Gt_LtE",
        13,
        0,
    ): (
        "matters",
        "The log would give the epsilon of the plan after more steps than planned: `test_balls_in_bins.py::test_the_epsilon_in_a_log_is_never_that_of_fewer_steps`",
    ),
    (
        "hf_dpopt/noise/blt.py",
        "_BltObjective._decays",
        "weights = (rates[:, None] - others[None, :]).prod(1) / among.prod(1)",
        "core/ReplaceBinaryOperator_Div_Sub",
        53,
        0,
    ): (
        "matters",
        "The nearest tests were not those that see it, which was the choice of tests; the suite did: `test_tuning.py::test_tuned_for_a_workload`",
    ),
    (
        "hf_dpopt/accounting/random_allocation.py",
        "best_tree",
        "if max(ring.covariances[1:], default=0.0) == 0 or ring.variance * ring.chains > MAX_VARIANCE:",
        "core/ReplaceOrWithAnd",
        47,
        0,
    ): (
        "harmless",
        "A shortcut that ends in a raw error where nothing is protected, but for callers that return infinity before; killed all the same: `test_random_allocation.py::test_independent_bins_and_noise_that_protects_nothing_need_no_search`",
    ),
    (
        "hf_dpopt/run/run.py",
        "recorded_plan",
        'if keeps_budget and plan is not None and plan["noise_multiplier"] == 0:',
        "core/ReplaceComparisonOperator_IsNot_Is",
        25,
        0,
    ): (
        "matters",
        "`test_run.py::test_a_budget_is_not_kept_on_top_of_steps_without_noise`",
    ),
    (
        "hf_dpopt/sampling/balls_in_bins.py",
        "BallsInBinsSampler.excess",
        "return sum(chains) - planned if len(chains) == 1 else None",
        "core/NumberReplacer",
        47,
        0,
    ): (
        "matters",
        "Steps beyond the plan of a second chain would have been counted as those of one: `test_balls_in_bins.py::test_steps_beyond_the_plan_are_counted_in_one_chain`",
    ),
    (
        "hf_dpopt/clipping/rules/adapters.py",
        "ia3_linear",
        "target = target * copy_per_record(site, name, target)",
        "core/ReplaceBinaryOperator_Mul_Sub",
        16,
        0,
    ): (
        "matters",
        "The nearest tests were not those that see it, which was the choice of tests; the suite did: `test_exactness.py::test_clipped_sum_equals_a_loop_over_records`",
    ),
    (
        "hf_dpopt/plan/local_training.py",
        "LocalTraining.batches",
        "return found if self.steps is None else found[: self.steps]",
        "core/ReplaceComparisonOperator_Is_IsNot",
        27,
        0,
    ): (
        "matters",
        "More local steps than were asked for: `test_local.py::test_local_steps_are_as_many_as_asked_for_and_every_epoch_has_every_record`",
    ),
    (
        "hf_dpopt/noise/blt.py",
        "_BltObjective._decays",
        "powers = torch.exp(self._powers[:, None] * rates.log()[None, :])",
        "core/ReplaceBinaryOperator_Mul_Add",
        41,
        0,
    ): (
        "matters",
        "The nearest tests were not those that see it, which was the choice of tests; the suite did: `test_tuning.py::test_tuned_for_a_workload`",
    ),
    (
        "hf_dpopt/run/keys.py",
        "PrivateState.load_noise",
        'return torch.load(path, weights_only=True, map_location="cpu")  # a rank\'s device is its own affair',
        "core/ReplaceTrueWithFalse",
        37,
        0,
    ): (
        "matters",
        "A file in the private folder could run code: `test_private_state.py::test_a_state_of_noise_runs_no_code`",
    ),
    (
        "hf_dpopt/sampling/cyclic_poisson.py",
        "_groups",
        'groups = random_words(derive_key(key, "cyclic groups"), 0, num_examples) % np.uint64(num_groups)',
        "core/NumberReplacer",
        56,
        0,
    ): (
        "matters",
        "Seen by the frozen outputs, which cost more than the budget; a resumed run would change its groups: `test_cyclic_poisson.py::test_groups_of_a_key_do_not_change`",
    ),
    (
        "hf_dpopt/noise/finite_time.py",
        "LinearRegression.__post_init__",
        'for name in ("eigenvalues", "start"):',
        "core/ZeroIterationForLoop",
        12,
        0,
    ): (
        "harmless",
        "Lists instead of arrays; killed all the same: `test_finite_time.py::test_a_problem_may_be_given_as_lists`",
    ),
    (
        "hf_dpopt/plan/config.py",
        "PrivacyConfig.num_units",
        'in_places = self.privacy_unit == "user" and self.sampling == "capped_poisson"',
        "core/ReplaceComparisonOperator_Eq_GtE",
        58,
        0,
    ): (
        "matters",
        "The default delta would be that of fewer users: `test_config.py::test_units_are_users_unless_their_records_are_drawn_one_by_one`",
    ),
    (
        "hf_dpopt/run/run.py",
        "PrivateRun._check_checkpoint",
        "if not resume_step or checkpoint is None:",
        "core/AddNot",
        3,
        0,
    ): (
        "matters",
        "Checkpoints of other runs were taken; a dearer test sees it, now a cheap one, too: `test_run.py::test_a_checkpoint_that_the_ledger_does_not_know_is_refused_before_a_step`",
    ),
    (
        "hf_dpopt/accounting/rough.py",
        "_orders",
        "log_binomial_AK = gammaln(a_A1 + 1) - gammaln(k_1K + 1) - gammaln(np.maximum(a_A1 - k_1K, 0) + 1)",
        "core/NumberReplacer",
        90,
        0,
    ): (
        "same",
        "log 0! and log 1! are both 0",
    ),
    (
        "hf_dpopt/clipping/rules/fallback.py",
        "_record_gradients",
        "batched = [isinstance(x, torch.Tensor) and x.dim() > 0 and x.size(0) == num_records for x in leaves]",
        "core/NumberReplacer",
        53,
        1,
    ): (
        "matters",
        "A number beside the records ends in a raw error: `test_fallback.py::test_a_tensor_without_dimensions_belongs_to_every_record`",
    ),
    (
        "hf_dpopt/accounting/random_allocation.py",
        "best_tree",
        "if max(ring.covariances[1:], default=0.0) == 0 or ring.variance * ring.chains > MAX_VARIANCE:",
        "core/NumberReplacer",
        45,
        1,
    ): (
        "harmless",
        "A shortcut: for independent bins the search finds the same tree",
    ),
    ("hf_dpopt/plan/plan.py", "build_plan", "check_noise_multiplier(noise_multiplier)", "DropStatement", 0, 0): (
        "matters",
        "Noise given to `make_plan` as a text ended in a raw error: `test_plan.py::test_the_noise_of_a_record_is_checked_like_that_of_the_options`",
    ),
    (
        "hf_dpopt/run/run.py",
        "PrivateRun.charge",
        "if target is not None and next_charged[-1] > self.plan.num_steps - self._start:",
        "core/AddNot",
        3,
        0,
    ): (
        "matters",
        "Steps beyond a plan would not keep the budget: `test_budget.py::test_a_step_beyond_the_plan_is_refused_where_it_would_cost_more_than_the_budget`",
    ),
    (
        "hf_dpopt/clipping/capture.py",
        "Capture._layers",
        'is_flattened = any(path == p or path.startswith(p + ".") for p in flattened)',
        "core/ReplaceComparisonOperator_Eq_NotEq",
        24,
        0,
    ): (
        "same",
        "The list names several children, so each layer differs from one; a layer that is wrapped without need passes (B, T, D) on, and (B, D) as (B, 1, D)",
    ),
    (
        "hf_dpopt/noise/finite_time.py",
        "LinearRegression._feedback",
        "if (left <= 0).any():",
        "core/NumberReplacer",
        12,
        1,
    ): (
        "matters",
        "A bound on the error of a problem that diverges: `test_finite_time.py::test_at_a_rate_below_the_contraction_the_feedback_is_infinite`",
    ),
    (
        "hf_dpopt/accounting/random_allocation.py",
        "_two_levels",
        "for inner, stride in _inside(num_bins // n):",
        "core/ZeroIterationForLoop",
        21,
        0,
    ): (
        "harmless",
        "Every tree of bins gives a proven bound; fewer are looked at, so epsilon is larger at most",
    ),
    (
        "hf_dpopt/run/run.py",
        "PrivateRun.draw",
        "if self._participations is not None and step > self._start:",
        "core/ReplaceComparisonOperator_Gt_Eq",
        45,
        0,
    ): (
        "matters",
        "The nearest tests ran out of their time before the one that sees it: `test_participation.py::test_a_run_refuses_a_batch_that_breaks_the_promise`",
    ),
    (
        "hf_dpopt/run/key_memory.py",
        "KeyMemory.close",
        "os.close(self._file)",
        "DropStatement",
        0,
        0,
    ): (
        "harmless",
        "A descriptor stayed open until the process ended; the lock, which has one of its own, was let go: `test_key_memory.py::test_a_memory_that_is_closed_holds_no_file`",
    ),
    (
        "hf_dpopt/sampling/capped_poisson.py",
        "CappedPoissonSampler.describe",
        'f"Example-level sampling: each of the {self.num_examples // self.records_per_user} {unit}s has "',
        "core/ReplaceBinaryOperator_FloorDiv_BitOr",
        57,
        0,
    ): (
        "matters",
        "The statement would name another number of users: `test_records.py::test_the_description_counts_users_and_places`",
    ),
    (
        "hf_dpopt/clipping/engine.py",
        "ClippingEngine.gradient_of",
        "with torch.autocast(losses_B.device.type, enabled=False):",
        "core/ReplaceFalseWithTrue",
        50,
        0,
    ): (
        "same",
        "A backward runs in the dtypes that its forward chose, a checkpointed block takes back the autocast of its own forward, and the sum of float32 losses stays float32",
    ),
    (
        "hf_dpopt/clipping/kernels/outer.py",
        "_squares_kernel",
        "i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)",
        "core/NumberReplacer",
        14,
        1,
    ): (
        "matters",
        "Norms of records of 1,088 tokens and more would be wrong; the tests had 300: `test_kernels.py::test_squares_of_long_records`",
    ),
    (
        "hf_dpopt/run/keys.py",
        "PrivateState.settle_birth",
        "self._birth_note(chain_id, ledger).unlink(missing_ok=True)",
        "core/ReplaceTrueWithFalse",
        53,
        0,
    ): (
        "matters",
        "A run that is killed right after would end in a raw error: `test_private_state.py::test_a_birth_that_was_settled_before_is_settled`",
    ),
    (
        "hf_dpopt/noise/blt.py",
        "_splits",
        "for place in (0.999 * falling[-1], 0.5 * falling[-1], 1 - 0.1 * (1 - falling[0])):",
        "core/ReplaceBinaryOperator_Sub_Mul",
        67,
        0,
    ): (
        "harmless",
        "One of three places from which the tuning descends; the error that it ends at is compared, and tested",
    ),
    (
        "hf_dpopt/run/ledger.py",
        "Ledger.open",
        'write_durably(ledger.path, header + b"\\n", mode=0o644)',
        "core/NumberReplacer",
        48,
        1,
    ): (
        "matters",
        "Other users could write the ledger: `test_ledger.py::test_a_ledger_is_intact_until_something_else_is_at_its_place`",
    ),
    (
        "hf_dpopt/run/ledger.py",
        "Ledger.is_intact",
        "if self._file is None:",
        "core/ReplaceComparisonOperator_Is_IsNot",
        14,
        0,
    ): (
        "matters",
        "A ledger that is replaced under a run went unnoticed; dear tests of faults see it, now a cheap one, too: `test_ledger.py::test_a_ledger_is_intact_until_something_else_is_at_its_place`",
    ),
    (
        "hf_dpopt/run/keys.py",
        "PrivateState.data_mark",
        'return read_whole(path).decode(errors="replace") if path.exists() and not chain.unsafe else None',
        "core/ReplaceUnaryOperator_Delete_Not",
        70,
        0,
    ): (
        "matters",
        "A run would go on with other records; a dear test of users sees it, now a cheap one, too: `test_private_state.py::test_a_chain_keeps_the_records_it_began_with`",
    ),
    (
        "hf_dpopt/plan/advice.py",
        "TrainingJob.learning_rate",
        "length = min(max((REFERENCE_STEPS / outlook.num_steps) ** (1 / 3), 0.3), 1.5)",
        "core/NumberReplacer",
        73,
        0,
    ): (
        "harmless",
        "A learning rate of short runs that is advised: no promise depends on it",
    ),
    (
        "hf_dpopt/run/run.py",
        "PrivateRun._answer_opening",
        "if opening is None or not self._is_asking or step != self._opened:",
        "core/ReplaceComparisonOperator_NotEq_IsNot",
        50,
        0,
    ): (
        "harmless",
        "It refuses more: a query in a chain that begins beyond step 256, where equal numbers may be two objects",
    ),
    (
        "hf_dpopt/sampling/fixed_order.py",
        "_order",
        "order.setflags(write=False)",
        "DropStatement",
        0,
        0,
    ): (
        "harmless",
        "Nothing writes to the order that is kept; the flag is for code to come",
    ),
    (
        "hf_dpopt/noise/strategy.py",
        "NoiseStrategy",
        "@abc.abstractmethod",
        "core/RemoveDecorator",
        0,
        0,
    ): (
        "harmless",
        "A strategy without its matrix was refused when it was asked for it, not when it was made: `test_strategies.py::test_a_strategy_without_its_matrix_cannot_be_made`",
    ),
    (
        "hf_dpopt/run/keys.py",
        "_why_branch",
        "if mark.step > reached or mark.digest is None or not ledger.contains(mark.digest):",
        "core/ReplaceOrWithAnd",
        23,
        0,
    ): (
        "matters",
        "A run charges the unknown step first, which hid it; by itself it is seen now: `test_key_memory.py::test_a_key_that_was_used_beyond_the_ledger_gets_no_further_step`",
    ),
}
