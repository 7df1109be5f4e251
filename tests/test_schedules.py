"""Schedules: text of actions, orders against hand-written rows and PyTorch's, closed forms, CSV, grids."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_plans import plans, rows

from schedules import (
    Action,
    ActionKind,
    ScheduleError,
    add_communication,
    build_schedule,
    check_schedule,
    format_csv,
    parse_action,
    parse_csv,
    peak_activations,
    read_schedule_csv,
    simulate_unit_times,
    write_schedule_csv,
)

F, B, I, W = (  # noqa: E741
    ActionKind.FORWARD,
    ActionKind.FULL_BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)
TORCH = Path(__file__).parent / "data" / "torch_schedules.csv.gz"


# --- the text of an action ---


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F0", Action(0, F, 0)),
        ("12B345", Action(12, B, 345)),
        ("1I3", Action(1, I, 3)),
        ("2W1", Action(2, W, 1)),
        ("0SEND_F0", Action(0, ActionKind.SEND_F, 0)),
        ("1RECV_F0", Action(1, ActionKind.RECV_F, 0)),
        ("3SEND_B7", Action(3, ActionKind.SEND_B, 7)),
        ("2RECV_B7", Action(2, ActionKind.RECV_B, 7)),
        ("0UNSHARD", Action(0, ActionKind.UNSHARD)),
        ("4RESHARD", Action(4, ActionKind.RESHARD)),
        ("4REDUCE_GRAD", Action(4, ActionKind.REDUCE_GRAD)),
        ("(0F1;1B0)OVERLAP_F_B", Action(-1, ActionKind.OVERLAP_F_B, -1, (Action(0, F, 1), Action(1, B, 0)))),
    ],
)
def test_an_action_reads_and_writes_the_text_of_pytorch(text, action):
    assert parse_action(text) == action
    assert parse_action(f"  {text} ") == action
    assert str(action) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no action"),
        ("F0", "no action"),
        ("0X1", "no action"),
        ("0F0 junk", "no action"),
        ("-1F0", "no action"),
        ("0F", "names no microbatch"),
        ("1SEND_B", "names no microbatch"),
        ("(0F1;)OVERLAP_F_B", "no action"),
        ("(0F1;1B0)B", "no action"),
    ],
)
def test_text_that_is_no_action_is_refused(text, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        parse_action(text)


@pytest.mark.parametrize(
    ("text", "peer"),
    [("0SEND_F3", "1RECV_F3"), ("1RECV_F3", "0SEND_F3"), ("1SEND_B3", "0RECV_B3"), ("0RECV_B3", "1SEND_B3")],
)
def test_a_transfer_is_named_after_the_stage_of_the_rank_that_executes_it(text, peer):
    assert str(parse_action(text).peer) == peer


# --- orders ---


def test_gpipe_runs_all_forwards_then_all_backwards():
    assert rows(build_schedule("gpipe", 2, 1, 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_1f1b_warms_up_alternates_and_cools_down():
    assert rows(build_schedule("1f1b", 3, 1, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_1f1b_with_fewer_microbatches_than_stages_is_all_warm_up_on_the_first_ranks():
    assert rows(build_schedule("1f1b", 4, 1, 2)) == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3B0 3F1 3B1",
    ]


def test_interleaved_runs_groups_of_pp_through_each_chunk():
    """Figure 4 of arXiv:2104.04473 for two ranks with two chunks each."""
    assert rows(build_schedule("interleaved-1f1b", 2, 2, 4)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_interleaved_takes_the_table_megatron_documents_for_group_size_3():
    """The table beside ``get_schedule_table`` in Megatron-LM: pp 2, group size 3, 5 microbatches, 2 chunks."""
    microbatch = [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    chunk = [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    schedule = build_schedule("interleaved-1f1b", 2, 2, 5, group_size=3)
    for rank, row in enumerate(schedule.actions):
        forwards = [(a.stage, a.microbatch) for a in row if a.kind is F]
        backwards = [(a.stage, a.microbatch) for a in row if a.kind is B]
        assert forwards == [(2 * c + rank, m) for c, m in zip(chunk, microbatch, strict=True)]
        assert backwards == [(2 * (1 - c) + rank, m) for c, m in zip(chunk, microbatch, strict=True)]


@pytest.mark.parametrize(("rank", "warm_up"), [(0, 10), (1, 8), (2, 6), (3, 4)])
def test_interleaved_warms_up_two_forwards_more_a_rank_behind(rank, warm_up):
    """(pp - rank - 1) * 2 + (chunks - 1) * group forwards stand before the first pair of one forward, one backward."""
    kinds = [action.kind for action in build_schedule("interleaved-1f1b", 4, 2, 8).actions[rank]]
    assert kinds.index(B) == warm_up + 1


def torch_orders():
    lines = gzip.decompress(TORCH.read_bytes()).decode().splitlines()
    orders: dict[tuple[str, int, int, int], list[str]] = {}
    for line in lines[1:]:
        name, pp, chunks, microbatches, _, actions = line.split(";")
        orders.setdefault((name, int(pp), int(chunks), int(microbatches)), []).append(actions)
    return orders


def test_gpipe_is_the_order_of_pytorch():
    compared = 0
    for (name, pp, chunks, microbatches), order in torch_orders().items():
        if name == "GPipe":
            assert rows(build_schedule("gpipe", pp, chunks, microbatches)) == order
            compared += 1
    assert compared == 48


def test_1f1b_is_the_order_of_pytorch():
    """But for a slip in the order PyTorch 2.13 describes (not in what it executes): the last rank counts its forwards
    from 1. PyTorch takes no fewer microbatches than ranks.
    """
    compared = 0
    for (name, pp, chunks, microbatches), order in torch_orders().items():
        if name != "1F1B":
            continue
        ours = build_schedule("1f1b", pp, chunks, microbatches)
        shifted = [a._replace(microbatch=a.microbatch + 1) if a.kind is F else a for a in ours.actions[-1]]
        assert [*rows(ours)[:-1], " ".join(map(str, shifted))] == order
        compared += 1
    assert compared == 15 + 13 + 9


def test_interleaved_is_the_order_of_pytorch_with_its_group_size():
    """PyTorch takes groups of m // max(1, m // pp) microbatches where Megatron takes groups of pp. Equal for equal
    groups; PyTorch also takes fewer microbatches than ranks, which Megatron refuses.
    """
    compared = refused = 0
    for (name, pp, chunks, microbatches), order in torch_orders().items():
        if name != "Interleaved1F1B":
            continue
        group = microbatches // max(1, microbatches // pp)
        if microbatches < pp:
            with pytest.raises(ScheduleError, match="must lie between"):
                build_schedule("interleaved-1f1b", pp, chunks, microbatches, group)
            refused += 1
        else:
            assert rows(build_schedule("interleaved-1f1b", pp, chunks, microbatches, group)) == order
            compared += 1
    assert compared >= 40
    assert refused == 2 * (1 + 3 + 7)


# --- closed forms ---

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 5, 8, 16)]


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name, pp, microbatches):
    times = simulate_unit_times(build_schedule(name, pp, 1, microbatches))
    assert times.bubble_fraction == pytest.approx((pp - 1) / (microbatches + pp - 1))
    assert times.makespan == pytest.approx(3 * (microbatches + pp - 1))


@pytest.mark.parametrize("backward", [1.0, 2.0, 3.5])
@pytest.mark.parametrize(
    ("pp", "chunks", "microbatches"), [(2, 2, 2), (2, 4, 8), (4, 2, 4), (4, 2, 8), (4, 3, 16), (8, 4, 16)]
)
def test_bubble_of_interleaved(pp, chunks, microbatches, backward):
    times = simulate_unit_times(
        build_schedule("interleaved-1f1b", pp, chunks, microbatches), backward=backward
    )
    assert times.bubble_fraction == pytest.approx((pp - 1) / (chunks * microbatches + pp - 1))


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
def test_microbatches_in_flight(pp, microbatches):
    in_flight = peak_activations(build_schedule("1f1b", pp, 1, microbatches))
    assert in_flight == tuple(min(pp - rank, microbatches) for rank in range(pp))
    assert peak_activations(build_schedule("gpipe", pp, 1, microbatches)) == (microbatches,) * pp


@pytest.mark.parametrize(
    ("pp", "chunks", "microbatches", "group"),
    [(4, 2, 8, 4), (4, 2, 4, 4), (4, 3, 16, 6), (2, 2, 5, 3), (8, 4, 8, 8)],
)
def test_interleaved_holds_a_warm_up_and_one_more(pp, chunks, microbatches, group):
    in_flight = peak_activations(build_schedule("interleaved-1f1b", pp, chunks, microbatches, group))
    assert in_flight == tuple(
        min((pp - rank - 1) * 2 + (chunks - 1) * group + 1, chunks * microbatches) for rank in range(pp)
    )


@given(plans())
@settings(max_examples=80, deadline=None)
def test_every_schedule_is_complete_and_runs(plan):
    schedule = build_schedule(*plan)
    check_schedule(schedule)
    assert schedule.stages == plan[1] * plan[2]
    assert sum(map(len, schedule.actions)) == 2 * schedule.stages * schedule.microbatches


# --- names and sizes ---


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("zb-h1", 2, 1, 4), r"unknown schedule 'zb-h1': valid are gpipe, 1f1b, interleaved-1f1b"),
        (("GPip", 2, 1, 4), "did you mean gpipe"),
        (("interleaved", 2, 2, 4), "did you mean interleaved-1f1b"),
        (("1f1b", 2, 2, 4), "vpp=2; use interleaved-1f1b"),
        (("1f1b", 0, 1, 4), "pp=0 must be at least 1"),
        (("1f1b", 2, 1, 0), "microbatches=0 must be at least 1"),
        (("1f1b", 2, 1, 4, 2), "no microbatch groups"),
        (("interleaved-1f1b", 4, 1, 8), "vpp=1 and pp=4; use 1f1b"),
        (("interleaved-1f1b", 1, 2, 8), "vpp=2 and pp=1; use 1f1b"),
        (("interleaved-1f1b", 4, 2, 6), "6 microbatches in groups of 4 leave a last group of 2.*as 4 or 8"),
        (("interleaved-1f1b", 4, 2, 2), r"group of 4 .*default.* between pp=4 and microbatches=2"),
        (("interleaved-1f1b", 4, 2, 8, 3), r"group of 3 .*given"),
        (("interleaved-1f1b", 4, 2, 8, 9), r"group of 9 .*given"),
        (("nowhere.csv", 2, 1, 4), "cannot read schedule nowhere.csv"),
    ],
)
def test_what_cannot_be_built_says_why(arguments, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        build_schedule(*arguments)


def test_names_are_read_in_any_case():
    assert build_schedule("1F1B", 2, 1, 2) == build_schedule("1f1b", 2, 1, 2)


# --- CSV ---


@given(plans(), st.booleans())
@settings(max_examples=30, deadline=None)
def test_csv_keeps_a_schedule(plan, communicates):
    schedule = build_schedule(*plan)
    schedule = add_communication(schedule) if communicates else schedule
    assert parse_csv(format_csv(schedule), schedule.name) == schedule


def test_idle_cells_and_blank_last_lines_are_dropped():
    assert parse_csv("0F0,,,0B0\r\n,1F0,1B0,\n\n").actions == parse_csv("0F0,0B0\n1F0,1B0").actions


def test_csv_says_which_rank_holds_a_stage():
    v_shape = parse_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    assert v_shape.stage_ranks == (0, 1, 1, 0)
    check_schedule(v_shape)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no actions"),
        ("0F0,0B0\n1F0,1Q0", r"row 2 \(rank 1\), column 2: '1Q0' is no action"),
        ("0F0,0B0\n0F1,0B1", r"stage 0 is on rank 0 \(0F0\) and on rank 1 \(0F1\)"),
        ("0F0,0B0\n2F0,2B0", "no rank works on stage 1"),
        ("0F0,0B0\n\n1F0,1B0", "at least one stage a rank"),
    ],
)
def test_csv_that_is_no_schedule_is_refused(text, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        parse_csv(text)


def test_a_file_is_a_schedule_of_its_own(tmp_path):
    path = tmp_path / "mine.csv"
    write_schedule_csv(build_schedule("1f1b", 2, 1, 3), path)
    assert rows(build_schedule(str(path), 2, 1, 3)) == rows(build_schedule("1f1b", 2, 1, 3))
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.csv"]
    with pytest.raises(ScheduleError, match="3 microbatches instead of 4"):
        build_schedule(str(path), 2, 1, 4)
    path.write_text("0F0,0B0\n1B0,1F0\n")
    with pytest.raises(ScheduleError, match="deadlock"):
        read_schedule_csv(path)
    with pytest.raises(ScheduleError, match="cannot write"):
        write_schedule_csv(build_schedule("1f1b", 2, 1, 3), tmp_path / "absent" / "mine.csv")


# --- pictures ---


def test_the_time_grid_gives_an_action_as_many_columns_as_it_lasts():
    assert simulate_unit_times(build_schedule("1f1b", 2, 1, 2)).grid().splitlines() == [
        "rank 0  0F0 0F1 ........0B0---- ....0B1----",
        "rank 1  ....1F0 1B0---- 1F1 1B1---- ........",
    ]


def test_a_wide_grid_is_cut_off():
    lines = simulate_unit_times(build_schedule("1f1b", 4, 1, 64)).grid(width=60).splitlines()
    assert all(len(line) <= 60 and line.endswith("...") for line in lines)


def test_the_example_of_the_documentation_prints_what_it_shows(capsys):
    page = (Path(__file__).parent.parent / "docs" / "schedules.md").read_text(encoding="utf-8")
    code, shown = re.search(r"```python\n(.*?)```\n```\n(.*?)```", page, re.DOTALL).groups()
    exec(code, {})
    assert capsys.readouterr().out == shown
