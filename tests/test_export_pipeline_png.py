"""The PNG of a run: what the SVG draws, at twice its size; and what is said where it cannot be drawn."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from exporters.pipeline_png import SCALE, PictureError, pipeline_png
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import TrackRole
from tests.test_export_pipeline_svg import timeline_of
from tracesim.cli import main

FORWARD, BACKWARD, ODD_FORWARD, IDLE = (0x00, 0x72, 0xB2), (0x00, 0x9E, 0x73), (0x6F, 0xB1, 0xDC), (0xF1,) * 3
LEFT, TOP, PLOT = 88, 74, 828
"""Where the first band begins in the SVG, and how wide it is."""
drawn = pytest.mark.skipif(find_spec("PIL") is None, reason="Pillow is not installed (the extra png)")


def two_actions(name: str = "test") -> Timeline:
    """A forward in the first half of 10 ms, a backward in the last fifth."""
    pipeline = TrackRole.PIPELINE
    return timeline_of([(0, pipeline, "F0", 0, 5), (0, pipeline, "B0", 8, 10)], name=name)


def pixels(packed: bytes) -> np.ndarray:
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(packed))
    assert image.format == "PNG"
    return np.asarray(image.convert("RGB"))


def at(picture: np.ndarray, share: float, y: float) -> tuple[int, ...]:
    """The colour at a share of the plot's width, in SVG units from the top."""
    return tuple(int(value) for value in picture[round(SCALE * y), round(SCALE * (LEFT + share * PLOT))])


@drawn
def test_actions_have_the_colours_of_the_svg_where_they_ran():
    picture = pixels(pipeline_png(two_actions()))
    assert picture.shape[1] == 1000 * SCALE
    colours = [at(picture, share, TOP + 3) for share in (0.01, 0.49, 0.51, 0.79, 0.81, 0.99)]
    assert colours == [FORWARD, FORWARD, IDLE, IDLE, BACKWARD, BACKWARD]


@drawn
def test_names_stand_in_actions_and_beside_ranks():
    picture = pixels(pipeline_png(two_actions()))
    # White letters on the forward, at its middle; dark ones on white in front of the band.
    label = picture[SCALE * TOP : SCALE * (TOP + 24), SCALE * (LEFT + 200) : SCALE * (LEFT + 214)]
    assert (label.min(axis=2) > 240).sum() > 20
    title = picture[SCALE * 12 : SCALE * 26, SCALE * 16 : SCALE * 60]
    assert (title.max(axis=2) < 60).sum() > 50
    rank = picture[SCALE * (TOP + 6) : SCALE * (TOP + 18), SCALE * 16 : SCALE * 60]
    assert (rank.max(axis=2) < 60).sum() > 30


@drawn
def test_memory_is_translucent_and_communication_has_its_strips():
    gib = 2**30
    timeline = timeline_of(
        [
            (0, TrackRole.PIPELINE, "F0", 0, 5),
            (0, TrackRole.PIPELINE, "B0", 5, 10),
            (0, TrackRole.COMPUTE, "kernel", 0, 10),
            (0, TrackRole.COMMUNICATION_DP, "reduce", 0, 5),
        ],
        [(0, "allocated", -1, [(0, gib), (5, 4 * gib), (10, gib)])],
    )
    picture = pixels(pipeline_png(timeline))
    # 45 % of #CC79A7 on white, where the curve is high.
    assert at(picture, 0.72, TOP + 24 + 8 + 4 + 10) == pytest.approx((0xE8, 0xC2, 0xD7), abs=2)
    # The strip of overlapped communication, in its first half only.
    assert at(picture, 0.2, TOP + 24 + 1 + 4 + 2) == (0x56, 0xB4, 0xE9)
    assert at(picture, 0.83, TOP + 24 + 1 + 4 + 2) == (255, 255, 255)


@drawn
def test_the_same_timeline_gives_the_same_bytes():
    assert pipeline_png(two_actions("a < b · ü")) == pipeline_png(two_actions("a < b · ü"))


@drawn
def test_the_commands_write_pictures_by_the_name_of_the_file(tmp_path: Path):
    show = ["schedule", "show", "interleaved-1f1b", "--pp", "2", "--microbatches", "2", "-o"]
    for name, begins in (("a.png", b"\x89PNG"), ("a.SVG", b"<svg"), ("a.pftrace", b"\x0a")):
        result = CliRunner().invoke(main, [*show, str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        assert f"wrote {tmp_path / name}" in result.output.replace("\n", "")
        assert (tmp_path / name).read_bytes().startswith(begins)
    picture = pixels((tmp_path / "a.png").read_bytes())
    assert (picture == ODD_FORWARD).all(axis=2).any()
    result = CliRunner().invoke(
        main, ["run", "llama2-7b-dp8", "-o", str(tmp_path / "run"), "--format", "png"]
    )
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["pipeline.png", "report.json"]


def test_without_pillow_one_message_says_what_to_install_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(PictureError, match=r"pip install tracesim\[png\]`, or write an SVG"):
        pipeline_png(two_actions())
    show = ["schedule", "show", "gpipe", "--pp", "2", "--microbatches", "2", "-o", str(tmp_path / "x.png")]
    run = ["run", "llama2-7b-dp8", "-o", str(tmp_path / "out"), "--format", "perfetto,png"]
    for arguments in (show, run):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2
        assert "a PNG is drawn with Pillow, which is not installed" in result.output
    assert list(tmp_path.rglob("*")) == []


def test_other_pictures_are_refused_and_nothing_is_written(tmp_path):
    show = ["schedule", "show", "gpipe", "--pp", "2", "--microbatches", "2", "--svg", str(tmp_path / "x.svg")]
    result = CliRunner().invoke(main, [*show, "-o", str(tmp_path / "x.gif")])
    assert result.exit_code == 2
    assert "pictures are drawn as .svg or .png, not .gif" in result.output
    assert list(tmp_path.rglob("*")) == []


@drawn
def test_a_pillow_without_letters_of_any_size_is_told(monkeypatch):
    font = pytest.importorskip("PIL.ImageFont")

    def old() -> None:
        """The signature before Pillow 10.1."""

    monkeypatch.setattr(font, "load_default", old)
    with pytest.raises(PictureError, match=r"needs Pillow 10\.1 or later with FreeType"):
        pipeline_png(two_actions())
