"""``tracesim replay`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from exporters import write_chrome
from tests.recordings import Recording
from tracesim.cli import main
from tracesim.readers import read_trace


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run of three steps, as a file."""
    recording = Recording()
    for number in range(3):
        at = 1000.0 * number
        recording.step(number, at, at + 990)
        recording.launch("forward_gemm", at + 20, at + 27, 300)
        recording.launch("backward_gemm", at + 30, at + 328, 500)
        recording.call("cudaDeviceSynchronize", at + 40, 796)
    path = tmp_path_factory.mktemp("recorded")
    write_chrome(recording.timeline(), path)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


def test_it_prints_measured_against_replayed(recorded: Path) -> None:
    result = run(recorded)
    assert result.exit_code == 0, result.output
    for said in (
        "step time",
        "measured ms",
        "replayed ms",
        "streams",
        "unexplained lateness kept",
        "limited by",
    ):
        assert said in result.output


def test_json_holds_the_same_figures(recorded: Path) -> None:
    result = json.loads(run(recorded, "--json").output)
    assert result["schema"] == "tracesim.replay/1"
    assert [step["step"] for step in result["steps"]] == [0, 1, 2]
    assert result["worst_abs_error_pct"] < 1
    assert all(stream["same_order"] for stream in result["streams"])
    assert result["what_if"] is None


def test_what_ifs_combine(recorded: Path) -> None:
    result = json.loads(run(recorded, "--what-if", "scale=0.5", "--what-if", "host=0.1", "--json").output)
    found = result["what_if"]
    assert found["what_ifs"] == ["scale=0.5", "host=0.1"]
    assert found["step_ms"] < 0.6 * found["base_step_ms"]
    assert found["range_ms"][0] <= found["step_ms"] <= found["range_ms"][1]


def test_both_runs_are_written_side_by_side(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "side.pftrace"
    assert run(recorded, "-o", out).exit_code == 0
    timeline = read_trace([out])
    names = [timeline.string(int(name)) for name in timeline.tracks.name]
    device = [name for name in names if "stream" in name and "annotations" not in name]
    assert len(device) == 2
    assert device[1] == f"replayed {device[0]}"
    counts = [int((timeline.slices.track == names.index(name)).sum()) for name in device]
    assert counts == [6, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--what-if", "scael=2"], "Did you mean scale"),
        (["--what-if", "scale=x"], "a factor is a number from 0 on"),
    ],
)
def test_bad_what_ifs_exit_with_2(recorded: Path, arguments: list[str], message: str) -> None:
    result = run(recorded, *arguments)
    assert result.exit_code == 2
    assert message in result.output
