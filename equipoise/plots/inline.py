"""Charts inside an HTML page, so that it needs no other file."""

import base64
import re

from equipoise.plots.registry import Chart


def to_base64(chart: Chart, kind: str = "png") -> str:
    """A chart for the address of an image: `<img src="data:image/png;base64,…">` (svg: `image/svg+xml`)."""
    return base64.b64encode(chart.render(kind)).decode("ascii")


def svg_text(chart: Chart) -> str:
    """A chart as an `<svg>` element to put into a page; it takes the width it is given.

    The frame of an SVG file (declaration, metadata) is gone, and so is the style rule that would reach beyond the
    element.
    """
    text = chart.render("svg").decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"\s*<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    head, body = text.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    return f'{head} role="img" style="width: 100%; stroke-linejoin: round; stroke-linecap: butt">{body}'
