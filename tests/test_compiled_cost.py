"""Cycles of a compiled program: its own, and those of loops as often as they run."""

import pytest

from realm_jax.compiled_cost import program_cost

PROGRAM = """HloModule jit_step, entry_computation_layout={()->f32[]}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %fusion.1 = f32[8]{0:T(128)} fusion(%p), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"7"}
  ROOT %inner = (s32[], f32[8]) while(%fusion.1), condition=%short, body=%leaf
}

%leaf (q: (s32[], f32[8])) -> (s32[], f32[8]) {
  %kernel.1 = f32[8]{0} custom-call(%q), custom_call_target="tpu_custom_call", KERNEL
  ROOT %copy = f32[8]{0} copy(%q), backend_config={"window_config":{},"estimated_cycles":"5"}
}

%short (q: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(2)
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT, metadata={op_name="lt"}
}

%long (q: (s32[], f32[8])) -> pred[] {
  %limit.1 = s32[]{:T(128)} constant(11)
  ROOT %greater = pred[]{:T(512)} compare(%limit.1, %i), direction=GT
}

%once (q: f32[8]) -> f32[8] {
  %kernel.2 = f32[8]{0} custom-call(%q), custom_call_target="tpu_custom_call", KERNEL
  ROOT %add = f32[8]{0} add(%q, %q), backend_config={"estimated_cycles":"3"}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %dot = f32[8]{0} convolution(%a, %a), backend_config={"estimated_cycles":"1000"}
  %called = f32[8]{0} call(%dot), to_apply=%once
  ROOT %loop = (s32[], f32[8]) while(%called), condition=%long, body=%body
}
""".replace("KERNEL", 'metadata={op_name="jit(f)/jvp(attend)/pallas_call" stack_frame_id=6}, backend_config={}')


def test_a_loop_counts_as_often_as_it_runs():
    assert program_cost(PROGRAM) == (1000 + 3 + 11 * (7 + 2 * 5), {"attend": 1 + 11 * 2})


def test_a_condition_is_an_error():
    with pytest.raises(ValueError, match="has a condition"):
        program_cost(PROGRAM.replace(" call(%dot), to_apply=%once", " conditional(%dot), branch_computations={%once}"))


@pytest.mark.parametrize("limit", ["%limit = s32[]{:T(128)} parameter(0)", "%limit = s64[] constant(2)"])
def test_a_loop_without_a_known_end_is_an_error(limit):
    with pytest.raises(ValueError, match="does not say how often its loop short runs"):
        program_cost(PROGRAM.replace("%limit = s32[]{:T(128)} constant(2)", limit))
