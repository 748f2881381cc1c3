"""What a run has come to, from its `metrics.jsonl`: a page with plots, and the numbers of the plain report.

The page is one file without scripts; its policy forbids every request. Refused: nothing: a line that is not whole, as
the last may be while a run is going on, is passed over.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from typing import TYPE_CHECKING, Any

from regardant.page import plot
from regardant.train.heads import MEASURES
from regardant.writing import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PAGE = "report.html"

_TITLES = {
    "entropy": "Entropy: how widely each head looks (nats)",
    "max_logit": "The largest score before the softmax",
    "sink": "Sink: mean weight on the first token",
    "previous": "Previous token: mean weight on the token before",
    "induction": "Induction: mean weight on the token after the earlier copy, on repeated random tokens",
}

_SHARES = frozenset({"sink", "previous", "induction"})

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2em auto; padding: 0 1em }
body { color: #222; background: #fff }
svg { width: 100%; height: auto } svg text { font-size: 11px; fill: #555 }
.grid { stroke: #ddd } svg.key { width: 10px; height: 10px } .legend span { margin-right: 1em; white-space: nowrap }
table { border-collapse: collapse } td, th { padding: .1em .8em; text-align: right }
td:first-child { text-align: left }
polyline:hover { stroke-width: 4 }
"""


def records(run: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's metrics, one after the other."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def summary(run: Path) -> dict[str, Any]:
    """The last of each number, and the best heads: (measure, layer, head, value) by measure."""
    found: dict[str, Any] = {}
    for record in records(run):
        for name in ("loss", "valid_loss", "valid_nats_per_byte", "heads", "tokens"):
            if name in record:
                found[f"last_{name}"] = record[name]
    heads = found.pop("last_heads", None)
    if heads is not None:
        for name in ("induction", "previous"):
            ranked = sorted(
                (
                    (value, layer, head)
                    for layer, row in enumerate(heads[name])
                    for head, value in enumerate(row)
                ),
                reverse=True,
            )
            found[name] = [
                {"layer": layer, "head": head, "score": value} for value, layer, head in ranked[:4]
            ]
    return found


def write(run: Path, outcome: Mapping[str, Any] | None = None) -> Path:
    """Write the page of a run and give its path. Memory: the metrics.

    Raises:
        UserError: it cannot be written.
    """
    path = run / PAGE
    with replacing(path) as temporary:
        temporary.write_text(page(run, outcome), encoding="ascii", errors="xmlcharrefreplace")
    return path


def page(run: Path, outcome: Mapping[str, Any] | None = None) -> str:
    """The page of a run, as one string."""
    steps, losses, valid, measured = [], [], [], []
    for record in records(run):
        if "loss" in record:
            steps.append(record["step"])
            losses.append(record["loss"])
        if "valid_loss" in record:
            valid.append((record["step"], record["valid_loss"]))
        if "heads" in record:
            measured.append((record["step"], record["heads"]))
    title = f"Training of {run.resolve().name}"
    sections = [
        f"<h1>{html.escape(title)}</h1>",
        _facts(outcome),
        "<h2>Loss (nats a token)</h2>",
        plot.legend([("training", plot.COLOURS[5]), ("validation", plot.COLOURS[1])]),
        plot.lines(
            "Loss",
            [
                plot.Line("training", steps, losses, plot.COLOURS[5], thin=True),
                plot.Line("validation", *_columns(valid), plot.COLOURS[1]),
            ],
            "step",
            "",
        ),
        *_heads(measured, max(steps, default=0)),
    ]
    policy = f"default-src 'none'; style-src '{_hash(_STYLE)}'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def _columns(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _heads(measured: list[tuple[int, dict[str, list[list[float]]]]], last: int) -> Iterator[str]:
    if not measured:
        return
    layers = len(measured[-1][1][MEASURES[0]])
    colours = [plot.COLOURS[layer % len(plot.COLOURS)] for layer in range(layers)]
    yield "<h2>Heads</h2><p>One line a head, coloured by layer; point at one for its name.</p>"
    yield plot.legend([(f"layer {layer}", colour) for layer, colour in enumerate(colours)])
    at = [step for step, _ in measured]
    for name in reversed(MEASURES):
        drawn = [
            plot.Line(
                f"layer {layer}, head {head}",
                at,
                [heads[name][layer][head] for _, heads in measured],
                colours[layer],
            )
            for layer, row in enumerate(measured[-1][1][name])
            for head in range(len(row))
        ]
        # Weights are shares of 1; the others begin at 0. So that small differences look small.
        span = (0.0, 1.0) if name in _SHARES else (0.0,)
        drawing = plot.lines(_TITLES[name], drawn, "step", "", (0, last), span)
        yield f"<h3>{html.escape(_TITLES[name])}</h3>{drawing}"
    yield f"<h2>Heads at step {at[-1]:,}</h2>{_table(measured[-1][1])}"


def _table(heads: dict[str, list[list[float]]]) -> str:
    rows = (
        f"<tr><td>layer {layer}, head {head}</td>"
        + "".join(f"<td>{heads[name][layer][head]:.3f}</td>" for name in MEASURES)
        + "</tr>"
        for layer, row in enumerate(heads[MEASURES[0]])
        for head in range(len(row))
    )
    top = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in MEASURES)
    return f"<table><tr><th></th>{top}</tr>{''.join(rows)}</table>"


def _facts(outcome: Mapping[str, Any] | None) -> str:
    if outcome is None:
        return ""
    shown = {
        "steps": f"{outcome['step']:,} of {outcome['steps']:,}",
        "parameters": f"{outcome['parameters']:,}",
        "time": f"{outcome['seconds'] / 60:,.1f} minutes",
    }
    if "valid_loss" in outcome:
        shown["validation"] = (
            f"{outcome['valid_loss']:.4f} nats a token, {outcome['valid_nats_per_byte']:.4f} nats a byte"
        )
    rows = (f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in shown.items())
    return f"<table>{''.join(rows)}</table>"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
