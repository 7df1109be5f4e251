"""Schedules: text of actions, orders against hand-written rows and PyTorch's, closed forms, CSV, grids."""

from __future__ import annotations

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
        ("0F-1", "no action"),
        ("9" * 5000 + "F0", "no action"),
        ("\u0661F0", "no action"),
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


@given(plans())
@settings(max_examples=150, deadline=None)
def test_every_schedule_is_complete_and_runs(plan):
    _, pp, chunks, microbatches, _ = plan
    schedule = build_schedule(*plan)
    check_schedule(schedule)
    assert schedule.model_stages == pp * chunks
    kinds = [part.kind for row in schedule.actions for action in row for part in action.parts]
    passes = pp * chunks * microbatches
    assert kinds.count(F) == passes
    assert kinds.count(B) + kinds.count(I) == (0 if schedule.forward_only else passes)
    assert kinds.count(I) == kinds.count(W)


@pytest.mark.parametrize(
    ("plan", "ranks_of_stages", "chunks_of_stages"),
    [
        (("interleaved-1f1b", 2, 2, 2), [0, 1, 0, 1], [0, 0, 1, 1]),
        (("zb-v", 2, 2, 3), [0, 1, 1, 0], [0, 0, 1, 1]),
        (("dualpipe", 2, 1, 4), [0, 1, 1, 0], [0, 0, 1, 1]),
    ],
)
def test_where_stages_lie(plan, ranks_of_stages, chunks_of_stages):
    schedule = build_schedule(*plan)
    assert [schedule.stage_rank(stage) for stage in range(4)] == ranks_of_stages
    assert [schedule.chunk(stage) for stage in range(4)] == chunks_of_stages


def test_a_bidirectional_schedule_holds_two_copies_of_the_model():
    schedule = build_schedule("dualpipe", 4, 1, 8)
    assert schedule.copies == 2
    assert [schedule.model_stage(stage) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [stage for stage in range(8) if schedule.is_first(stage)] == [0, 4]
    assert [stage for stage in range(8) if schedule.is_last(stage)] == [3, 7]
    assert schedule.stage_microbatches(3) == range(4)
    assert schedule.stage_microbatches(4) == range(4, 8)
    # Seen in a mirror both directions are alike.
    mirrored = [
        [
            str(part._replace(stage=(part.stage + 4) % 8, microbatch=(part.microbatch + 4) % 8))
            for part in a.parts
        ]
        for a in schedule.actions[3]
    ]
    assert [[str(part) for part in action.parts] for action in schedule.actions[0]] == mirrored


def test_zb_h1_is_the_figure_of_its_paper():
    """Figure 3 (top) of arXiv:2401.10241: 4 ranks, rank 0 runs W at once, rank 3 three backwards late."""
    order = rows(build_schedule("zb-h1", 4, 1, 8))
    assert order[0].startswith("0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5")
    assert order[3].startswith("3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1")
    assert order[3].endswith("3F7 3I7 3W4 3W5 3W6 3W7")


def test_combined_1f1b_pairs_different_microbatches_layer_by_layer():
    """On one rank Megatron-LM's overlap of expert communication is F0, (F1 B0), (F2 B1), B2."""
    assert rows(build_schedule("1f1b-overlap", 1, 1, 3)) == [
        "0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2"
    ]
    assert rows(build_schedule("1f1b-overlap-wgrad", 1, 1, 2)) == ["0F0 (0F1;0I0)OVERLAP_F_B 0W0 0I1 0W1"]


@pytest.mark.parametrize("name", ["1f1b-overlap", "1f1b-overlap-wgrad"])
@pytest.mark.parametrize(("rank", "warm_up"), [(0, 11), (1, 9), (2, 7), (3, 5)])
def test_combined_1f1b_warms_up_one_forward_more_than_interleaved(name, rank, warm_up):
    schedule = build_schedule(name, 4, 2, 8)
    kinds = [action.kind for action in schedule.actions[rank]]
    assert kinds.index(ActionKind.OVERLAP_F_B) == warm_up
    for action in schedule.actions[rank]:
        if action.sub_actions:
            ahead, back = action.sub_actions
            assert (ahead.stage, ahead.microbatch) != (back.stage, back.microbatch)


# --- names and sizes ---


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("zb-h3", 2, 1, 4), r"unknown schedule 'zb-h3': valid are gpipe, 1f1b, interleaved-1f1b.*mean zb-h"),
        (("zb-h1", 2, 2, 4), "zb-h1 needs one model chunk a rank, not vpp=2"),
        (("zb-v", 2, 1, 4), "zb-v needs two model chunks a rank, laid out as a V, not vpp=1"),
        (("dualpipe", 3, 1, 8), "even pp .* not pp=3"),
        (("dualpipe", 4, 1, 9), "even number of at least 2 \\* pp = 8 microbatches"),
        (("dualpipe", 4, 1, 6), "microbatches=6; use zb-h1"),
        (("dualpipev", 4, 2, 7), "2 \\* pp = 8, not 7; use zb-v"),
        (
            ("interleaved-1f1b:grup=4", 2, 2, 4),
            "'grup=4' is no option of interleaved-1f1b, which takes group=..., flush=...",
        ),
        (("interleaved-1f1b:group=x", 2, 2, 4), "group=x must be a whole number"),
        (("1f1b:group=2", 2, 1, 4), "no option of 1f1b, which takes flush=...$"),
        (("1f1b:flush=3", 2, 1, 8), "flush=3 must divide the 8 microbatches of a step; nearest: 2"),
        (("1f1b:flush=0", 2, 1, 8), "flush=0 must divide the 8 microbatches"),
        (("dualpipe:flush=4", 4, 1, 16), "2 \\* pp = 8 microbatches"),
        (("greedy:memory=1", 4, 2, 4), "memory limit of 1 activations is below 2.*allow at least 2"),
        (("greedy:minimize=memory", 4, 1, 4), "minimize=memory must be makespan or longest-rank"),
        (("greedy:weight_memory=2", 4, 1, 4), "weight_memory=2.0 must be a share of an activation"),
        (("greedy:times=profiled", 4, 1, 4), "from the scenario it runs in, and there is none here"),
        (("greedy:forward=-1", 4, 1, 4), "cost forward=-1.0 must be a number of at least 0"),
        (("GPip", 2, 1, 4), "did you mean gpipe"),
        (("interleaved", 2, 2, 4), "did you mean interleaved-zb or interleaved-1f1b"),
        (("1f1b", 2, 2, 4), "not vpp=2 .*; use interleaved-1f1b"),
        (("1f1b", 0, 1, 4), "pp=0 must be at least 1"),
        (("1f1b", 2, 1, 0), "microbatches=0 must be at least 1"),
        (("1f1b", 2, 1, 4, 2), "no microbatch groups"),
        (("interleaved-1f1b", 4, 1, 8), "vpp=1 and pp=4; use 1f1b"),
        (("interleaved-1f1b", 1, 2, 8), "vpp=2 and pp=1; use 1f1b"),
        (("interleaved-1f1b", 4, 2, 6), "6 microbatches in groups of 4 leave a last group of 2.*as 4 or 8"),
        (("interleaved-1f1b", 4, 2, 8, 3), r"group of 3 .*given.* between 4 and 8"),
        (("interleaved-1f1b", 4, 2, 8, 9), r"group of 9 .*given"),
        (("nowhere.csv", 2, 1, 4), "cannot read schedule nowhere.csv"),
    ],
)
def test_what_cannot_be_built_says_why(arguments, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        build_schedule(*arguments)


@pytest.mark.parametrize(
    ("name", "vpp"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2), ("dualpipev", 2), ("dualpipe", 1)]
)
def test_a_flushed_schedule_is_its_own_calls_one_after_another(name, vpp):
    """Every call is the schedule of so many microbatches; of two copies of the model each takes half of every call."""
    pp, flush, calls = 4, 8, 3
    once = build_schedule(name, pp, vpp, flush)
    whole = build_schedule(f"{name}:flush={flush}", pp, vpp, flush * calls)
    check_schedule(whole)
    share = flush // once.copies
    for row, single in zip(whole.actions, once.actions, strict=True):
        assert len(row) == calls * len(single)
        for call in range(calls):
            for action, alone in zip(row[call * len(single) :], single, strict=False):
                pairs = zip(action.sub_actions or (action,), alone.sub_actions or (alone,), strict=True)
                for part, model in pairs:
                    copy, index = divmod(model.microbatch, share)
                    assert (part.stage, part.kind) == (model.stage, model.kind)
                    assert part.microbatch == copy * share * calls + call * share + index


def test_a_flushed_pipeline_pays_its_ramps_in_every_call():
    """Forwards of 1 and backwards of 2 on p ranks: a call of n takes 3 (n + p - 1), and no call has more in flight."""
    schedule = build_schedule("1f1b:flush=4", 4, 1, 12)
    assert simulate_unit_times(schedule).makespan == 3 * 3 * (4 + 3)
    assert peak_activations(schedule) == (4, 3, 2, 1)


def test_names_are_read_in_any_case():
    assert build_schedule("1F1B", 2, 1, 2) == build_schedule("1f1b", 2, 1, 2)


def test_options_stand_behind_the_name():
    assert build_schedule("interleaved-1f1b:group=4", 2, 2, 8) == build_schedule(
        "interleaved-1f1b", 2, 2, 8, 4
    )
    assert peak_activations(build_schedule("greedy:memory=3,weight=0.5", 4, 1, 8)) == (3, 3, 3, 3)
    lighter = build_schedule("greedy:memory=8,weight=0.5,weight_memory=0.5,minimize=longest-rank", 4, 1, 16)
    assert max(peak_activations(lighter)) > 8 >= max(peak_activations(lighter, 0.5))


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
        ("0F0,0F99999999999999999,0B0", "microbatches 0 to 99999999999999999 are expected"),
        ("99999999999999F0,0B0", "no rank works on stage 1"),
        ("0F0;0B0", "row 1 .* is no action"),
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


@pytest.mark.parametrize("microbatches", [3_000_000, 10**11])
def test_more_forwards_than_can_be_written_out_are_refused_at_once(microbatches):
    with pytest.raises(ScheduleError, match=r"forwards on all ranks, and at most 4000000 are written out"):
        build_schedule("1f1b", 4, 1, microbatches)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("begin", ["", "\ufeff"])
def test_a_csv_of_other_programs_is_read(tmp_path, begin, end):
    """Byte order mark, line ends of Windows, trailing commas and empty cells."""
    path = tmp_path / "schedule.csv"
    lines = ["0F0,0F1,,0B0,,0B1,,", ",1F0,1B0,1F1,1B1,,,"]
    path.write_bytes((begin + "".join(line + end for line in lines)).encode())
    assert read_schedule_csv(path).actions == build_schedule("1f1b", 2, 1, 2).actions
