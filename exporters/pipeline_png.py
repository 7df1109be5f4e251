"""The picture of a pipelined run as PNG: the SVG of :mod:`exporters.pipeline_svg`, drawn with Pillow.

Pillow is an extra (``pip install tracesim[png]``), and brings the font, so that text is the same on systems that have
none. What is drawn is what ``pipeline_svg`` writes and no more: rectangles, texts, and paths of straight lines along
the axes, with the colours of its style classes. It is drawn larger and scaled down, which smooths its edges.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from op_graphs.timeline import Timeline

from .pipeline_svg import pipeline_svg

if TYPE_CHECKING:
    from PIL import Image as ImageModule
    from PIL import ImageDraw as ImageDrawModule

SCALE = 2
"""Pixels of the PNG to one of the SVG's units."""
_SMOOTHING = 2
_LETTERS = 0.92
"""Size of Pillow's font that is as wide as the SVG's at size 1."""
_RULE = re.compile(r"\.(\w+)\{([^}]*)\}")
_STEP = re.compile(r"([MHVhvz])([^MHVhvz]*)")
_NAMESPACE = "{http://www.w3.org/2000/svg}"

_Point = tuple[float, float]


class PictureError(ValueError):
    """A picture cannot be drawn with what is installed."""


def require_pillow() -> None:
    """Find out whether a PNG can be drawn.

    Raises:
        PictureError: if Pillow is not installed, or cannot draw text of any size.
    """
    try:
        import PIL
        from PIL import ImageFont
    except ImportError as error:
        raise PictureError(
            "a PNG is drawn with Pillow, which is not installed: run `pip install tracesim[png]`, or write an SVG"
        ) from error
    try:
        ImageFont.load_default(11.0)
    except (ImportError, OSError, TypeError) as error:
        raise PictureError(
            f"a PNG needs Pillow 10.1 or later with FreeType, and {PIL.__version__} cannot draw text of a size: "
            "run `pip install --upgrade tracesim[png]`, or write an SVG"
        ) from error


def pipeline_png(timeline: Timeline) -> bytes:
    """The timeline as a PNG of two pixels to a unit of :func:`~exporters.pipeline_svg.pipeline_svg`.

    Raises:
        ValueError: as ``pipeline_svg``.
        PictureError: as :func:`require_pillow`.
    """
    svg = pipeline_svg(timeline)
    require_pillow()
    from PIL import Image, ImageDraw

    root = ElementTree.fromstring(svg)
    factor = SCALE * _SMOOTHING
    width, height = (int(root.attrib[side]) for side in ("width", "height"))
    image = Image.new("RGB", (width * factor, height * factor), "#FFFFFF")
    drawing = _Drawing(image, ImageDraw.Draw(image), factor, _classes(root), float(root.attrib["font-size"]))
    for element in root:
        drawing.add(element)
    packed = io.BytesIO()
    image.resize((width * SCALE, height * SCALE), Image.Resampling.BOX).save(packed, "PNG")
    return packed.getvalue()


def _classes(root: ElementTree.Element) -> dict[str, dict[str, str]]:
    """The properties of each style class."""
    style = root.find(f"{_NAMESPACE}style")
    return {
        name: dict(rule.split(":") for rule in rules.split(";") if rule)
        for name, rules in _RULE.findall(style.text or "" if style is not None else "")
    }


@dataclass
class _Drawing:
    image: ImageModule.Image
    draw: ImageDrawModule.ImageDraw
    factor: int
    classes: Mapping[str, Mapping[str, str]]
    font_size: float

    def add(self, element: ElementTree.Element) -> None:
        """Draw an element, in the order of the document."""
        properties = {**self.classes.get(element.get("class", ""), {}), **element.attrib}
        kind = element.tag.removeprefix(_NAMESPACE)
        if kind == "rect":
            x, y, wide, high = (float(properties.get(name, 0)) for name in ("x", "y", "width", "height"))
            radius = float(properties.get("rx", 0)) * self.factor
            self.draw.rounded_rectangle(self._box(x, y, x + wide, y + high), radius, fill=properties["fill"])
        elif kind == "text":
            self._text(element, properties)
        elif kind == "path" and "stroke" in properties:
            self._lines(properties)
        elif kind == "path":
            self._areas(properties)

    def _box(self, left: float, top: float, right: float, bottom: float) -> tuple[int, int, int, int]:
        """Pixels from the first to the last, at least one."""
        x, y = round(left * self.factor), round(top * self.factor)
        return x, y, max(x, round(right * self.factor) - 1), max(y, round(bottom * self.factor) - 1)

    def _text(self, element: ElementTree.Element, properties: Mapping[str, str]) -> None:
        from PIL import ImageFont

        size = float(properties.get("font-size", self.font_size))
        at = (float(properties["x"]) * self.factor, float(properties["y"]) * self.factor)
        self.draw.text(
            at,
            element.text or "",
            fill=properties.get("fill", "#000000"),
            font=ImageFont.load_default(size * self.factor * _LETTERS),
            anchor="ms" if properties.get("text-anchor") == "middle" else "ls",
            stroke_width=1 if properties.get("font-weight") == "bold" else 0,
        )

    def _areas(self, properties: Mapping[str, str]) -> None:
        """Fill the outlines of a path; they may be translucent."""
        outlines = [
            [(x * self.factor, y * self.factor) for x, y in points] for points in _outlines(properties["d"])
        ]
        opacity = float(properties.get("fill-opacity", 1))
        for points in outlines:
            xs, ys = [x for x, _ in points], [y for _, y in points]
            box = (round(min(xs)), round(min(ys)), round(max(xs)) - 1, round(max(ys)) - 1)
            if len(set(points)) == 4 and opacity == 1:
                self.draw.rectangle(
                    (*box[:2], max(box[0], box[2]), max(box[1], box[3])), fill=properties["fill"]
                )
            else:
                self._translucent(box, [points], properties["fill"], opacity)

    def _lines(self, properties: Mapping[str, str]) -> None:
        """Draw the lines of a path, each as the rectangle that it covers."""
        half = float(properties.get("stroke-width", 1)) / 2
        opacity = float(properties.get("stroke-opacity", 1))
        boxes = []
        for points in _outlines(properties["d"]):
            for (x, y), (to_x, to_y) in pairwise(points):
                across, along = (half, 0.0) if x == to_x else (0.0, half)
                left, right, top, bottom = min(x, to_x), max(x, to_x), min(y, to_y), max(y, to_y)
                boxes.append(self._box(left - across, top - along, right + across, bottom + along))
        if opacity == 1:
            for box in boxes:
                self.draw.rectangle(box, fill=properties["stroke"])
        elif boxes:
            around = (
                min(box[0] for box in boxes),
                min(box[1] for box in boxes),
                max(box[2] for box in boxes),
                max(box[3] for box in boxes),
            )
            corners = [[(x, y), (x2, y), (x2, y2), (x, y2)] for x, y, x2, y2 in boxes]
            self._translucent(around, corners, properties["stroke"], opacity)

    def _translucent(
        self,
        box: tuple[int, int, int, int],
        polygons: Sequence[Sequence[_Point]],
        colour: str,
        opacity: float,
    ) -> None:
        from PIL import Image, ImageDraw

        left, top, right, bottom = box
        mask = Image.new("L", (max(right - left, 0) + 1, max(bottom - top, 0) + 1), 0)
        onto = ImageDraw.Draw(mask)
        for points in polygons:
            onto.polygon([(x - left, y - top) for x, y in points], fill=round(255 * opacity))
        self.image.paste(colour, (left, top), mask)


def _outlines(path: str) -> Iterator[list[_Point]]:
    """The corners of each part of a path, in the SVG's units."""
    points: list[_Point] = []
    x = y = 0.0
    for command, text in _STEP.findall(path):
        numbers = [float(number) for number in text.replace(",", " ").split()]
        if command == "M":
            if points:
                yield points
            x, y = numbers
            points = []
        elif command in "Hh":
            x = numbers[0] + (x if command == "h" else 0)
        elif command in "Vv":
            y = numbers[0] + (y if command == "v" else 0)
        if command != "z":
            points.append((x, y))
    if points:
        yield points
