"""Tests of many cases: `make test` runs one in so many, and `make more` the others."""

from zlib import crc32

ONE_IN = {
    "compiled/test_captures.py": {
        "test_batches_of_any_size_are_filled_up_or_split": 3,
        "test_inductor_is_right_and_redoes_what_is_doubtful": 0,
        "test_inductor_takes_losses_that_close_over_tensors": 0,
    },
    "compiled/test_changes.py": {"test_row": 3},
    "compiled/test_exact.py": {
        "test_captured_quantities_are_those_of_eager_mode": 2,
    },
    "dp/test_audit.py": {"test_a_true_step_stands_by_any_route_and_plan": 3},
    "dp/test_batches.py": {
        "test_a_budget_is_kept_by_every_scheme": 2,
        "test_the_least_largest_batch_costs_at_most_one_per_cent": 0,
    },
    "dp/test_random_numbers.py": {
        "test_compiled_code_draws_the_same_numbers": 0,
        "test_every_way_releases_the_same_bits": 2,
        "test_graphs_release_the_same_bits": 4,
    },
    "functional/test_functional.py": {
        "test_a_model_is_usable_after_an_interrupt_at_any_line": 0,
    },
    "functional/test_modules.py": {
        "test_modules_are_recorded_with_the_numbers_of_a_loop": 2,
    },
    "optim/test_parity.py": {"test_100_steps_agree_with_torch": 2},
    "persample/test_bounds.py": {
        "test_samples_out_of_range_add_zero_and_are_counted": 3,
    },
    "persample/test_half_products.py": {
        "test_no_sample_adds_more_than_its_bound": 3,
        "test_the_bound_holds_for_sizes_at_the_ends_of_half_precision": 3,
    },
    "persample/test_in_place.py": {
        "test_clipped_sums_keep_their_bound": 3,
        "test_gradients_are_those_of_plain_autograd": 2,
    },
    "persample/test_inner.py": {
        "test_derivatives_inside_are_exact_by_the_route_that_is_named": 2,
    },
    "persample/test_quantities.py": {
        "test_dropout_draws_the_same_for_every_quantity": 3,
        "test_samples_left_out_change_no_bit_whatever_they_hold": 3,
    },
    "persample/test_random.py": {
        "test_a_graph_takes_keys_and_draws_what_eager_mode_draws": 3,
        "test_a_sample_draws_the_same_in_every_part_and_strategy": 4,
        "test_all_strategies_draw_the_same_shared_numbers": 4,
        "test_random_numbers_are_refused_or_differ_between_equal_samples": 3,
    },
    "persample/test_record.py": {"test_nothing_is_alive_after_a_call": 3},
    "persample/test_rules.py": {
        "test_every_quantity_of_an_op_equals_that_of_a_loop": 3,
        "test_quantities_are_right_in_lower_precision": 3,
        "test_the_other_strategies_have_the_same_numbers": 3,
    },
    "persample/test_traps.py": {
        "test_no_clipped_sample_is_longer_than_the_bound": 3,
        "test_one_sample_moves_the_sum_by_at_most_the_sensitivity": 3,
        "test_what_others_get_wrong_is_exact_in_every_form": 3,
    },
    "persample/test_truthful_tensors.py": {
        "test_every_answer_is_that_of_a_loop_or_an_error": 3,
    },
    "training/test_steps.py": {"test_a_step_is_its_parts": 2},
}
"""By file and test, 0 for none. Checksums of their names choose cases of any kind."""


def in_more(node: str) -> bool:
    """Whether a case runs by `make more` alone."""
    file, _, case = node.removeprefix("tests/").partition("::")
    share = ONE_IN.get(file, {}).get(case.partition("[")[0], 1)
    return share == 0 or crc32(node.encode()) % share != 0
