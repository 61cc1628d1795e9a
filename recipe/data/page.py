"""The report as one HTML page, with histograms and samples; it needs no other file and no network."""

import io
from pathlib import Path

import jinja2
import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from recipe.data.report import Report
from recipe.data.samples import Sample

TEMPLATE = Path(__file__).parent / "page.html.jinja"
COLOUR = "#3b6ea5"


def write_page(
    path: Path, title: str, report: Report, notes: list[str], samples: list[Sample], special: list[str]
) -> None:
    """Write the page to `path`.

    Args:
        notes: lines that stand above the tables.
        special: the tokenizer's special tokens, which are marked in the samples.
    """
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(TEMPLATE.read_text()).render(
        title=title,
        notes=notes,
        warnings=report.warnings,
        tables=[table for table in (report.source_table(), report.reason_table(), report.split_table()) if table],
        histograms=histograms(report),
        samples=[(sample, [_pieces(stretch.text, special) for stretch in sample.stretches]) for sample in samples],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)


def _pieces(text: str, special: list[str]) -> list[tuple[str, bool]]:
    """`text` cut at its special tokens, each piece with whether it is one."""
    pieces, rest = [], text
    while found := min(((rest.find(token), token) for token in special if token in rest), default=None):
        at, token = found
        pieces += [(rest[:at], False), (token, True)]
        rest = rest[at + len(token) :]
    return [piece for piece in [*pieces, (rest, False)] if piece[0]]


def histograms(report: Report) -> list[tuple[str, str]]:
    """(title, SVG) of each."""
    found = []
    for source in report.sources:
        if source.lengths is not None:
            bars = _bars(source.lengths.edges, source.lengths.counts, "tokens", report.max_length)
            found.append((f"{source.name}: tokens a row", bars))
    tenths = [at / 10 for at in range(11)]
    for name, split in report.splits():
        found.append((f"{name}: trained share of a row", _bars(tenths, split.trained, "share of the tokens")))
        if split.fill:
            found.append((f"{name}: fill of a block", _bars(tenths, split.fill, "share of the positions")))
    return found


def _bars(edges: list[float], counts: list[int], label: str, line: float | None = None) -> str:
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "recipe", "font.size": 8}):
        figure = Figure(figsize=(3.6, 2.1), layout="constrained")
        axes = figure.add_subplot()
        axes.stairs(counts, edges, fill=True, color=COLOUR)
        axes.set_xlim(edges[0], edges[-1])
        axes.set_xlabel(label)
        axes.set_ylabel("rows" if label != "share of the positions" else "blocks")
        axes.spines[["top", "right"]].set_visible(False)
        if line is not None:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(LogLocator(base=2, numticks=6))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axes.xaxis.set_minor_locator(NullLocator())
        if line is not None and line < edges[-1]:
            axes.axvline(line, color="#b03030", linewidth=1)
            axes.annotate(" max_length", (line, max(counts)), va="top", color="#b03030")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]
