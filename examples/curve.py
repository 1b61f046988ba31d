"""Draw a run's rewards and held-out rates.

python -m examples.curve runs/calculator examples/calculator/curve.svg
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from mega_rl.tracking.metrics.records import StepMetrics, read_metrics

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 300, 40, 30, 30  # pixels
STYLE = """
  text { font: 12px sans-serif; fill: #222 }
  .grid { stroke: #ddd }
  .train { fill: none; stroke: #8fb1d9 }
  .held { stroke: #c04e01; fill: #c04e01 }
"""
RATE = "val/pass_at_1"


def draw(records: Iterable[StepMetrics], title: str) -> str:
    """Return an SVG: the training reward as a line, held-out rates as points with their 95 % intervals."""
    records = list(records)
    steps = max(record.step for record in records)

    def at(step: int, value: float) -> tuple[float, float]:
        x, y = LEFT + (WIDTH - LEFT - 10) * step / steps, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value
        return round(x, 1), round(y, 1)

    parts = [f'<text x="{LEFT}" y="18">{title}: training reward and held-out rates, 95 % intervals</text>']
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        (left, y), (right, _) = at(0, tick), at(steps, tick)
        parts.append(f'<line class="grid" x1="{left}" y1="{y}" x2="{right}" y2="{y}"/>')
        parts.append(f'<text x="6" y="{y + 4}">{tick:g}</text>')
    line = " ".join("{},{}".format(*at(one.step, one.metrics["reward/mean"])) for one in records if one.step)
    parts.append(f'<polyline class="train" points="{line}"/>')
    for one in (record for record in records if RATE in record.metrics):
        (x, y), (_, low), (_, high) = (at(one.step, one.metrics[f"{RATE}{end}"]) for end in ("", "_low", "_high"))
        parts.append(f'<line class="held" x1="{x}" y1="{low}" x2="{x}" y2="{high}"/>')
        parts.append(f'<circle class="held" cx="{x}" cy="{y}" r="2"/>')
        parts.append(f'<text x="{x - 6}" y="{HEIGHT - 10}">{one.step}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    run, picture = map(Path, sys.argv[1:])
    picture.write_text(draw(read_metrics(run / "metrics.jsonl"), run.name), encoding="utf-8")
