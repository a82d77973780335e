"""What a compiled program costs, loops as often as they run, and how long it takes by that."""

import re

import jax
import jax.numpy as jnp
import pytest

from realm_jax.flops import V5E, V5P, chip, peak
from realm_jax.launch.cost import (
    CYCLES,
    Collective,
    Cost,
    Kernel,
    TopK,
    Transfer,
    is_ring,
    kernel_cycles,
    over_busiest_link,
    program_cost,
    program_time,
    sent,
    transferred,
)
from realm_jax.models.attention import KernelSettings, fused_attention
from realm_jax.models.packing import packing

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
    found = program_cost(PROGRAM)
    assert found.cycles == 1000 + 3 + 11 * (7 + 2 * 5)
    assert found.kernels == {Kernel("attend", (8,)): 1 + 11 * 2}


def test_a_kernel_on_packed_sequences_says_how_many_and_how_long():
    program = PROGRAM.replace("(attend)", "(attend_packed_and_drop_56_384)").replace(
        "f32[8]{0} custom", "bf16[99,768]{1,0} custom"
    )
    assert program_cost(program).kernels == {Kernel("attend_packed_and_drop", (56, 384, 768)): 1 + 11 * 2}
    long, short = (kernel_cycles(Kernel("attend_packed", (2, length, 768)), V5E) for length in (384, 256))
    assert long == short * (384 * 384) / (256 * 256) > kernel_cycles(Kernel("attend", (2, 384, 768)), V5E)


JOINED = """HloModule jit_step

%async (p: bf16[8,4]) -> bf16[64,4] {
  %all-gather.1 = bf16[64,4]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=3, GATHERED, dimensions={0}
}

%async.clone (p: bf16[8,4]) -> bf16[64,4] {
  %all-gather.1 = bf16[64,4]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=3, GATHERED, dimensions={0}
}

%all-reduce-scatter.1 (p: f32[8,4]) -> f32[2,4] {
  %all-reduce.2 = f32[8,4]{1,0:T(8,128)} all-reduce(%p), channel_id=8, replica_groups={{0,1,2,3}}
}

%gathered (p: f32[8,4]) -> f32[2,4] {
  %gather.2 = f32[1000,1000]{1,0} gather(%p), offset_dims={1}
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %start = bf16[64,4]{1,0} fusion(%p), kind=kCustom, calls=%async
  %go-on = bf16[64,4]{1,0} fusion(%start), kind=kCustom, calls=%async.clone
  ROOT %next = (s32[], f32[8]) tuple(%p, %go-on)
}

%condition (q: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(11)
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %loop = (s32[], f32[8]) while(%a), condition=%condition, body=%body
  %both = (f32[16]{0}, f32[16,2]{1,0}) all-reduce-start(%a, %b), channel_id=4, replica_groups={{0,2},{1,3}}
  %shares = f32[5]{0} reduce-scatter(%a), channel_id=5, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %moved = f32[5]{0} collective-permute(%a), channel_id=6, source_target_pairs={{0,0},{1,2},{2,1}}
  %send = (f32[4,8]{1,0:T(8,128)}, u32[], token[]) send(%a, %t), channel_id=7, frontend_attributes={TRANSFER}
  %gather_fusion.9 = f32[6,100]{1,0} fusion(%a), kind=kCustom, calls=%gathered
  %scatter_fusion.9 = f32[6,100]{1,0} fusion(%a), kind=kCustom, calls=%gathered, backend_config={"estimated_cycles":"2"}
  %all-reduce-scatter.9 = f32[2,4]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1
  %sort.1 = (f32[7]{0}, s32[7]{0}) sort(%a, %b), dimensions={0}
  %scores = f32[512,100]{1,0:T(8,128)} fusion(%a), kind=kLoop, calls=%outside
  ROOT %top_k.1 = (f32[512,8]{0,1}, s32[512,8]{0,1}) custom-call(%scores), custom_call_target="TopK"
}
""".replace("TRANSFER", '_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"')
NOTATIONS = (
    ("replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", (0, 1, 2, 3), 4),
    ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", (0, 1, 2, 3, 4, 5, 6, 7), 8),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4), 2),
    ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3), 4),
    ("replica_groups={{0,3},{1,2}}", (0, 3), 2),
)


@pytest.mark.parametrize("notation, group, size", NOTATIONS)
def test_a_collective_counts_once_a_channel_and_joins_its_group(notation, group, size):
    """In whatever notation the compiler has its groups; what goes on beside other work is in the text twice."""
    found = program_cost(JOINED.replace("GATHERED", notation))
    assert len(group) == size
    assert found.collectives == {
        Collective("all-gather", 64 * 4 * 2, group): 11,
        Collective("all-reduce", 16 * 4 + 32 * 4, (0, 2)): 1,
        Collective("reduce-scatter", 5 * 4 * 2, (0, 2)): 1,
        Collective("collective-permute", 5 * 4, (1, 2)): 1,
        Collective("reduce-scatter", 8 * 4 * 4, (0, 1, 2, 3)): 1,
    }
    assert found.cycles == 2 and found.moved == 6 * 100 * 4 + 2 * 7 * 4
    assert found.top_k == {TopK(512 * 100 * 4, 8): 1}
    assert found.transfers == {Transfer("all-reduce", 4 * 8 * 4): 1}


@pytest.mark.parametrize(
    "known, other, named",
    [
        ("GATHERED", "replica_groups=somehow", "%all-gather.1"),
        ("condition=%condition, body", "cond=%condition, body", "%loop"),
        ("custom-call(%scores)", "custom-call(%others)", "%top_k.1"),
        ('"TopK"', '"tpu_custom_call"', "%top_k.1"),
    ],
)
def test_unreadable_programs_are_errors(known, other, named):
    with pytest.raises(ValueError, match=f"cannot be read: (?:ROOT )?{named}"):
        program_cost(JOINED.replace(known, other).replace("GATHERED", "replica_groups={{0,1}}"))


def test_a_loop_may_name_its_parts_in_any_order():
    other = JOINED.replace("condition=%condition, body=%body", "body=%body, condition=%condition")
    other = other.replace("GATHERED", "replica_groups={{0,1}}")
    assert program_cost(other).collectives[Collective("all-gather", 64 * 4 * 2, (0, 1))] == 11


@pytest.mark.parametrize("dtype, width", [("pred", 1), ("bf16", 2), ("f8e4m3fn", 1), ("s4", 1), ("c64", 8)])
def test_widths_of_numbers(dtype, width):
    program = JOINED.replace("GATHERED", "replica_groups={{0,1}}").replace("%scores = f32", f"%scores = {dtype}")
    assert program_cost(program).top_k == {TopK(512 * 100 * width, 8): 1}


def test_bytes_that_a_collective_sends():
    """Eight devices in one slice, and in two slices, of which each has four of them."""
    group, one, two = tuple(range(8)), [0] * 8, [0] * 4 + [1] * 4
    assert sent(Collective("all-gather", 800, group), one) == (700, 0)
    assert sent(Collective("all-reduce", 800, group), one) == (1400, 0)
    assert sent(Collective("all-gather", 800, group), two) == (600, 100)
    assert sent(Collective("all-reduce", 800, group), two) == (1200, 200)
    assert sent(Collective("all-reduce", 800, (0, 4)), two) == (0, 800)
    assert sent(Collective("all-to-all", 800, group), two) == (300, 400)
    assert sent(Collective("collective-permute", 800, (0, 1)), two) == (800, 0)
    assert sent(Collective("collective-permute", 800, (0, 4)), two) == (0, 800)
    assert sent(Collective("all-reduce", 800, (3,)), one) == (0, 0)


@pytest.mark.parametrize(
    "kind, moved", [("all-reduce", 80), ("all-gather", 120), ("reduce-scatter", 40), ("one-to-one", 60)]
)
def test_bytes_that_are_sent_to_two_other_slices(kind, moved):
    assert transferred(Transfer(kind, 60), 3) == moved


def test_times_are_known_of_every_kernel():
    """By the names that it has in a compiled program."""
    names = {"attend", "differentiate"}
    names |= {f"{name}_packed" for name in names}
    assert CYCLES.keys() == names | {f"{name}_and_drop" for name in names}
    layout = packing(jnp.ones((2, 16), bool), 1, 32, 16)
    states, bias, both = jnp.zeros((1, 16, 128)), jnp.zeros((1, 1, 16)), jnp.zeros((1, 32, 128))
    seeds = jnp.zeros((1, 2), jnp.uint32)
    for rate, ending in ((0.0, ""), (0.5, "_and_drop")):
        padded = lambda x, rate=rate: fused_attention(x, x, x, bias, seeds, KernelSettings(2, rate, None)).sum()  # noqa: E731
        packed = lambda x, rate=rate: fused_attention(  # noqa: E731
            x, x, x, layout, jnp.zeros((2, 2), jnp.uint32), KernelSettings(2, rate, None)
        ).sum()
        programs = str(jax.make_jaxpr(jax.grad(padded))(states)), str(jax.make_jaxpr(jax.grad(packed))(both))
        found = re.findall(r"\bname=((?:attend|differentiate)\w*)", "".join(programs))
        assert {re.sub(r"_2_16$", "", name) for name in found} == {f"{name}{ending}" for name in names}


def test_time_is_a_range_with_all_its_parts():
    cost = Cost(
        cycles=1_500_000,
        invalid_cycles=3_000_000,
        invalid_bytes=819_000,
        moved=819_000,
        kernels={Kernel("attend", (2, 100, 256)): 3},
        top_k={TopK(819_000, 8): 1},
        collectives={Collective("all-reduce", 8_000_000, (0, 1)): 1, Collective("all-gather", 6_250, (0, 2)): 1},
        transfers={Transfer("all-reduce", 6_250): 2},
    )
    kernels = 3 * 2 * 2 * 100 * 128 * CYCLES["attend"][V5E] / 1.5e9
    found = program_time(cost, V5E, [0, 0, 1, 1], [(0, 0), (1, 0)] * 2)
    assert found.parts == pytest.approx(
        {
            "matrix products": 1e-3,
            "other operations": 1e-6,
            "gathers, scatters and sorts": 2e-6,
            "attention kernels": kernels,
            "top-k": 1e-6,
            "collectives in a slice": 4e-5,
            "collectives between slices": 5e-6,
        }
    )
    assert found.low == pytest.approx(1e-3 + 1e-6 + 2e-6 + kernels + 1e-6)
    assert found.high == pytest.approx(1e-3 + 2e-3 + 2e-6 + kernels + 8e-6 + 8e6 / 45e9 + 5e-6)


def test_the_longest_part_is_the_shortest_time_of_a_step():
    slow = Cost(1, 0, 0, 0, {}, {}, {Collective("all-reduce", 10**9, (0, 1)): 1}, {})
    assert program_time(slow, V5E, [0, 1], [(0, 0)] * 2).low == pytest.approx(1e9 / 3.125e9)


ROW, BLOCK = [(x, 0) for x in range(8)], [(x, y) for x in range(4) for y in range(2)]


@pytest.mark.parametrize(
    ("coords", "sides", "wraps_from", "ring"),
    [
        (ROW, (8, 8), 16, False),
        (ROW, (8, 8), 8, True),
        (ROW[:4], (8, 8), 4, False),
        (BLOCK, (8, 8), 16, True),
        (BLOCK[:3], (8, 8), 16, False),
        ([(0, 0), (2, 0), (0, 2), (2, 2)], (8, 8), 16, False),
        ([(x, y) for x in range(3) for y in range(3)], (8, 8), 16, False),
    ],
)
def test_chips_form_a_ring_if_links_lead_around(coords, sides, wraps_from, ring):
    assert is_ring(coords, sides, wraps_from) == ring


@pytest.mark.parametrize(
    ("kind", "line", "ring"),
    [("all-gather", 700, 350), ("all-reduce", 1400, 700), ("all-to-all", 1600, 800), ("collective-permute", 800, 800)],
)
def test_a_line_has_a_busier_link_than_a_ring(kind, line, ring):
    collective = Collective(kind, 800, tuple(range(8)))
    assert over_busiest_link(collective, [0] * 8, False) == line
    assert over_busiest_link(collective, [0] * 8, True) == ring
    assert over_busiest_link(Collective("all-to-all", 800, (3,)), [0] * 8, True) == 0


def test_operations_that_the_compiler_does_not_model_count_apart():
    """With what they read and write in HBM, not in VMEM."""
    marked = '"estimated_cycles":"5","cost_model_type":"COST_MODEL_TYPE_INVALID"'
    program = PROGRAM.replace('"estimated_cycles":"5"', marked)
    found = program_cost(program)
    assert (found.cycles, found.invalid_cycles) == (1000 + 3 + 11 * 7, 11 * 2 * 5)
    assert found.invalid_bytes == 11 * 2 * 8 * 4  # the argument of its computation has no line of its own
    sums = """
  %x = bf16[64,4]{1,0:T(8,128)(2,1)} convolution(%q, %q)
  %y = bf16[64,4]{1,0:T(8,128)(2,1)S(1)} convolution(%q, %q)
  %z = (f32[4]{0:T(128)S(1)}, f32[4]{0:T(128)}) fusion(%x, /*index=1*/%y), kind=kLoop, backend_config={MARKED}
  ROOT %copy""".replace("MARKED", marked)
    assert program_cost(PROGRAM.replace("\n  ROOT %copy", sums)).invalid_bytes == 11 * 2 * (64 * 4 * 2 + 4 * 4)


def test_two_cores_share_a_kernel():
    one, two = (kernel_cycles(Kernel("differentiate", (1, 384, 128)), chip) for chip in (V5E, V5P))
    assert one == 384 * 384 * CYCLES["differentiate"][V5E]
    assert two == 384 * 384 * CYCLES["differentiate"][V5P] / 2


def test_chips_are_found_by_the_device_s_name():
    assert peak("TPU v5 lite") == 197e12 and peak("TPU v5p") == 459e12 and peak("NVIDIA H100 80GB HBM3") == 989e12
    assert chip("TPU v5 lite") is V5E and chip("TPU v5") is V5P
    assert chip("cpu") is None and peak("cpu") is None


def test_a_condition_is_an_error():
    with pytest.raises(ValueError, match="has a condition"):
        program_cost(PROGRAM.replace(" call(%dot), to_apply=%once", " conditional(%dot), branch_computations={%once}"))


@pytest.mark.parametrize("limit", ["%limit = s32[]{:T(128)} parameter(0)", "%limit = s64[] constant(2)"])
def test_a_loop_without_a_known_end_is_an_error(limit):
    with pytest.raises(ValueError, match="does not say how often its loop short runs"):
        program_cost(PROGRAM.replace("%limit = s32[]{:T(128)} constant(2)", limit))
