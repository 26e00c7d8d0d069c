"""A page of text, tables and charts in one HTML file that needs no other, for a phone as for a wide screen."""

import html
import os
import re
from collections.abc import Sequence
from pathlib import Path

from equipoise.plots.inline import to_base64
from equipoise.plots.registry import Chart

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #222; --soft: #5a5f66; --line: #d5d8dc; --block: #f4f5f7;
  --good: #00694d; --bad: #b33c00; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e4e6e8; --soft: #a3a9b0; --line: #3a3f45;
  --block: #212429; --good: #35c39a; --bad: #ff9b5e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.55 system-ui, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 1.2rem 1rem 4rem; }
p, ul, .table { max-width: 46rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0.8rem 0; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 0.6rem; padding-top: 0.9rem; border-top: 1px solid var(--line); }
.note { color: var(--soft); font-size: 0.9rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.95rem; }
th, td { text-align: right; vertical-align: top; padding: 0.4rem 0 0.4rem 0.9rem; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; }
th { font-weight: 600; } td { font-variant-numeric: tabular-nums; }
.verdicts { list-style: none; padding: 0; margin: 1rem 0; }
.verdicts li { margin: 0.5rem 0; padding: 0.6rem 0.9rem; background: var(--block); border-left: 4px solid var(--good); }
.verdicts b { color: var(--good); } .verdicts .bad { border-color: var(--bad); } .verdicts .bad b { color: var(--bad); }
.charts, .texts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem;
  align-items: start; margin: 1rem 0; }
figure { margin: 0; min-width: 0; }
.charts figure { background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: 0.6rem; }
.charts img { display: block; width: 100%; max-width: 30rem; height: auto; margin: 0 auto; }
figcaption { font-weight: 600; font-size: 0.95rem; margin-bottom: 0.3rem; }
pre { margin: 0; padding: 0.8rem; background: var(--block); border-radius: 6px; font-size: 0.85rem; line-height: 1.45;
  overflow-x: auto; } .texts pre { white-space: pre-wrap; overflow-wrap: anywhere; }
code { font-family: ui-monospace, monospace; font-size: 0.9em; overflow-wrap: anywhere; } pre code { font-size: 1em; }
"""


class Page:
    """A page that grows from top to bottom; what is given is text, not HTML, and `code` stands between backticks.

    Args:
        title: Of the page, and its first heading.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[str] = [f"<h1>{_words(title)}</h1>"]

    def heading(self, text: str) -> None:
        """The heading of a section."""
        self._parts.append(f"<h2>{_words(text)}</h2>")

    def text(self, text: str) -> None:
        """A paragraph."""
        self._parts.append(f"<p>{_words(text)}</p>")

    def note(self, text: str) -> None:
        """A paragraph of lesser weight."""
        self._parts.append(f'<p class="note">{_words(text)}</p>')

    def verdicts(self, verdicts: Sequence[tuple[bool, str]]) -> None:
        """Sentences that hold, or do not: said in words and not by colour alone."""
        lines = [
            f"<li{'' if holds else ' class=bad'}><b>{'holds' if holds else 'does not hold'}</b>: {_words(text)}</li>"
            for holds, text in verdicts
        ]
        self._parts.append(f'<ul class="verdicts">{"".join(lines)}</ul>')

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows under headings; the first column says what a row is."""
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(f"a row has {len(row)} cells for {len(columns)} columns: {row!r}.")
        head = "".join(f'<th scope="col">{_words(cell)}</th>' for cell in columns)
        body = "".join(f"<tr>{''.join(f'<td>{_words(cell)}</td>' for cell in row)}</tr>" for row in rows)
        self._parts.append(f'<div class="table"><table><tr>{head}</tr>{body}</table></div>')

    def charts(self, *charts: Chart) -> None:
        """Charts, beside each other where there is room."""
        images = [
            f'<figure><img alt="{html.escape(chart.title)}" src="data:image/svg+xml;base64,{to_base64(chart, "svg")}">'
            "</figure>"
            for chart in charts
        ]
        self._parts.append(f'<div class="charts">{"".join(images)}</div>')

    def texts(self, texts: dict[str, str]) -> None:
        """Samples of text by name, as they are, beside each other where there is room."""
        blocks = [
            f"<figure><figcaption>{_words(name)}</figcaption><pre>{html.escape(text)}</pre></figure>"
            for name, text in texts.items()
        ]
        self._parts.append(f'<div class="texts">{"".join(blocks)}</div>')

    def commands(self, lines: Sequence[str]) -> None:
        """Lines for a shell."""
        self._parts.append(f"<pre><code>{html.escape(chr(10).join(lines))}</code></pre>")

    def html(self) -> str:
        """The whole page."""
        body = "\n".join(self._parts)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html.escape(self.title)}</title>\n<style>{_STYLE}</style></head>\n"
            f"<body><main>\n{body}\n</main></body></html>\n"
        )

    def write(self, path: str | Path) -> Path:
        """Write the page, whole or not at all."""
        path = Path(path)
        partial = path.with_name(f".partial-{os.getpid()}-{path.name}")
        try:
            partial.write_text(self.html(), encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:  # of the file that was asked for, not of the one beside it
            partial.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from error
        return path


def _words(text: str) -> str:
    """Text as HTML, with `code` between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
