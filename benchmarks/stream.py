"""Memory and time of training data in memory and as a stream: the same Parquet files, one program for each road.

    python benchmarks/stream.py --rows 200000

Writes files of prompts of 1,500 characters (300 MB at 200,000 rows) with random words and numbers, then draws an epoch
from each road. The exit code is 1 when a stream takes more than a fifth of the memory that all prompts take.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from driver import Report, parser_of, run

SHARDS, BATCH, CHARACTERS = 10, 64, 1500


class Words:
    """Tokenizer of one id for each word of five letters."""

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, Any]:
        return {"input_ids": [[int(word) % 50_000 for word in text.split()] for text in texts]}

    def apply_chat_template(self, conversation: list[dict[str, str]], **settings: Any) -> str:
        raise AssertionError


def write(folder: Path, rows: int) -> list[str]:
    """Write the files; returns their paths."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw, files = random.Random(0), []
    for shard in range(SHARDS):
        count = rows * (shard + 1) // SHARDS - rows * shard // SHARDS
        prompts = [" ".join(f"{draw.randrange(100_000):05d}" for _ in range(CHARACTERS // 6)) for _ in range(count)]
        table = pa.table({"prompt": prompts, "answer": [str(number) for number in range(count)]})
        files.append(str(folder / f"train-{shard:05d}-of-{SHARDS:05d}.parquet"))
        pq.write_table(table, files[-1], compression="none", use_dictionary=False, row_group_size=1000)
    return files


def measure(road: str, files: list[str], rows: int) -> dict[str, float]:
    """Draw an epoch by one road; returns MB of memory above that before, and seconds to the first prompt and to all."""
    import datasets  # noqa: F401 both roads have it loaded, as a run has

    from mega_rl.data.columns import RowColumns
    from mega_rl.data.order import PromptSampler, StepOrder
    from mega_rl.data.prompts import PromptReading, load_prompts
    from mega_rl.data.stream import FileShard, StreamPlan, StreamReader, StreamSampler

    reading = PromptReading(Words(), 50_000, RowColumns("prompt", "answer"), None, 1000)
    before, begin = peak_mb(), time.perf_counter()
    order: StepOrder
    if road == "memory":
        prompts = load_prompts(files, reading)
        order = PromptSampler(prompts, batch_size=BATCH, shuffle=True, seed=0)
    else:
        shards = [FileShard(Path(file)) for file in files]
        reader = StreamReader("data.train_files", shards, reading, StreamPlan(int(road), shuffle=True, seed=0))
        order = StreamSampler(reader, lambda work: json.loads(json.dumps(work())), batch_size=BATCH, timeout_s=600)
    order.batch(0)
    first = time.perf_counter() - begin
    for step in range(1, rows // BATCH):
        order.batch(step)
    return {"mb": peak_mb() - before, "first_s": first, "epoch_s": time.perf_counter() - begin}


def peak_mb() -> float:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    """Run both roads and print a table; the exit code is that of `Report.end`."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--road", help=argparse.SUPPRESS)
    parser.add_argument("--files", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.road:
        Path(options.result).write_text(json.dumps(measure(options.road, options.files, options.rows)))
        return 0
    outcome = Report(options)
    if options.tiny:
        options.rows, options.blocks = 2000, [100]
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), options.rows)
        size = sum(Path(file).stat().st_size for file in files) / 1e6
        print(f"{options.rows:,} rows in {SHARDS} files of {size:.0f} MB")
        print(f"{'road':>14} {'peak MB':>8} {'first prompt s':>15} {'epoch s':>8}")
        for road in ("memory", *map(str, options.blocks)):
            result = Path(folder, f"{road}.json")
            own_part = ["--rows", str(options.rows), "--road", road, "--result", str(result), "--files", *files]
            run([__file__, *own_part], deadline_s=1800)
            figures[road] = own = json.loads(result.read_text())
            name = road if road == "memory" else f"blocks {road}"
            print(f"{name:>14} {own['mb']:8.0f} {own['first_s']:15.2f} {own['epoch_s']:8.1f}")
    streams = [figures[str(block)]["mb"] for block in options.blocks if block * 20 <= options.rows]
    if streams and max(streams) > figures["memory"]["mb"] / 5:
        outcome.missed.append(f"a stream takes {max(streams):.0f} MB of {figures['memory']['mb']:.0f}")
    units = {"mb": "MB at most", "first_s": "s to the first prompt", "epoch_s": "s an epoch"}
    numbers = {f"{road}: {units[key]}": value for road, own in figures.items() for key, value in own.items()}
    return outcome.end(figures, numbers=numbers)


if __name__ == "__main__":
    sys.exit(main())
