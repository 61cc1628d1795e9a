"""How far the planner is from measurements that others published.

    python benchmarks/plan_accuracy.py [FILE.csv ...] [--json] [--set a_memory] [--tier 1]

Each row of a file is a run and one figure that was measured. The row is read into a plan (benchmarks/published.py),
which knows nothing of the figure, and the two are held against each other, worst first. Rows that cannot be planned are
listed with the reason. No timing is done here, and no GPU is needed.

Without FILE: benchmarks/published.csv and published_more.csv, on which the constants of recipe/plan/fitted.py were
fitted (benchmarks/plan_fit.py), and published_held_out.csv, on which they were not.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the project is not installed

from benchmarks.published import CannotPlan, Row, figure, read, setup_of
from recipe.errors import UserError
from recipe.plan import memory, sharded, speed
from recipe.plan.setup import Setup

FITTED = [Path(__file__).with_name(name) for name in ("published.csv", "published_more.csv")]
HELD_OUT = Path(__file__).with_name("published_held_out.csv")
GOALS = {"a_memory": (0.06, 0.12), "b_throughput": (0.10, 0.20)}  # median and 90th percentile, tier 1
UNITS = {"GiB": 2**30, "GB": 1e9, "MB": 1e6}


@dataclass(frozen=True)
class Outcome:
    """A row's figure, predicted and measured.

    Args:
        right: of what fits and what does not, and of the largest micro-batch, to which 1 more or less is right; None
            for every other figure, which `error` judges.
    """

    row: Row
    predicted: float
    measured: float
    error: float
    right: bool | None = None

    def line(self) -> str:
        row = self.row
        mark = {True: " right", False: " WRONG", None: f"{self.error:+7.1%}"}[self.right]
        what = f"{row['metric']:22s} {self.predicted:10.2f} {self.measured:10.2f} {row['unit'][:8]:8s}"
        run = f"{row['model']} {row['num_gpus']}x{row['gpu']} {row['strategy'][:20]}"
        batch = f"s{row['seq_len']} b{row['micro_batch']} {row['activation_checkpointing'][:12]}"
        return f"{mark}  {row['id']:20s} {what} {run} {batch}"


@dataclass(frozen=True)
class Part:
    """A file's rows, planned and not."""

    file: Path
    found: list[Outcome]
    refused: list[tuple[Row, str]]

    @property
    def groups(self) -> dict[str, dict[str, Any]]:
        """A summary by set and tier."""
        by_name: dict[str, list[Outcome]] = {}
        for one in self.found:
            by_name.setdefault(f"{one.row['set']} tier {one.row['tier']}", []).append(one)
        return {name: summary(by_name[name]) for name in sorted(by_name)}


def largest_micro_batch(setup: Setup) -> int:
    size = 0
    while size < 4096 and memory.needed(replace(setup, micro_batch=size + 1)) <= setup.gpu.memory:
        size += 1
    return size


def predict(row: Row) -> Outcome:
    """
    Raises:
        CannotPlan: the row's run is not planned, or its figure not predicted.
        UserError: the row says what cannot be.
    """
    metric, measured = row["metric"], figure(row, "value")
    if metric in ("fits", "oom"):
        setup = setup_of(row)
        needed = memory.needed(setup)
        foretold = (needed <= setup.gpu.memory) == ((metric == "fits") == (measured == 1))
        return Outcome(row, needed / 2**30, setup.gpu.memory_gib, 0.0 if foretold else 1.0, foretold)
    if not measured:
        raise CannotPlan(f"value is '{row['value']}'")
    predicted = _figure(row)
    right = abs(predicted - measured) <= 1 if metric == "max_micro_batch" else None
    return Outcome(row, predicted, measured, predicted / measured - 1, right)


def _figure(row: Row) -> float:
    """What the row measured, as the plan has it."""
    metric = row["metric"]
    if metric == "model_states_mem" and not row["seq_len"]:  # what lies there once the model is built
        row = row | {"seq_len": "1", "micro_batch": "1", "activation_checkpointing": "full", "compute_dtype": "bf16"}
        return sharded.resting(setup_of(row))["weights"] / _unit(row)
    setup = setup_of(row)
    match metric:
        case "peak_mem_reserved" | "peak_mem_unspecified":
            return memory.estimate(setup).reserved / _unit(row)
        case "peak_mem_reserved_step1":
            return memory.estimate(setup, step=1).reserved / _unit(row)
        case "peak_mem_active":
            return memory.estimate(setup).active / _unit(row)
        case "peak_mem_allocated":
            return memory.estimate(setup).allocated / _unit(row)
        case "max_micro_batch":
            return largest_micro_batch(setup)
        case "tokens_per_s_per_gpu":
            return speed.estimate(setup).tokens_per_second_per_gpu
        case "tflops_per_gpu" if "counts recomputation" in row["notes"]:
            return speed.hardware_tflops(setup, speed.estimate(setup))
        case "tflops_per_gpu":
            return speed.estimate(setup).model_tflops
    raise CannotPlan(f"metric '{metric}' is not planned" if metric else "metric is not stated")


def _unit(row: Row) -> float:
    return next((size for name, size in UNITS.items() if row["unit"].startswith(name)), 1.0)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Median and 90th percentile of the absolute error, and how many of the right-or-wrong rows are right."""
    graded = [one.right for one in outcomes if one.right is not None]
    errors = [one.error for one in outcomes if one.right is None]
    sizes = sorted(abs(error) for error in errors)
    said: dict[str, Any] = {"rows": len(errors), "right": f"{sum(graded)} of {len(graded)}"}
    if errors:
        said["median"] = statistics.median(sizes)
        said["p90"] = sizes[-(-9 * len(sizes) // 10) - 1]
        said["bias"] = statistics.mean(errors)
    return said


def compare(file: Path, only_set: str | None = None, only_tier: str | None = None) -> Part:
    """Every row of a file."""
    part = Part(file, [], [])
    for row in read(file):
        if only_set in (None, row["set"]) and only_tier in (None, row["tier"]):
            try:
                part.found.append(predict(row))
            except (CannotPlan, UserError) as error:
                part.refused.append((row, str(error)))
    return part


def _lines(part: Part) -> Iterator[str]:
    yield f"\n{part.file}\n  error  id                   metric                  predicted   measured"
    for one in sorted(part.found, key=lambda one: -abs(one.error)):
        yield one.line()
    for row, reason in part.refused:
        yield f"not planned: {row['id']} ({row['model']}, tier {row['tier']}): {reason}"
    for name, said in part.groups.items():
        text = f"{name}: {said['rows']} rows; fits, OOM and largest micro-batch: {said['right']} right"
        if "median" in said:
            goals = GOALS.get(name.split()[0]) if name.endswith("1") else None
            goal = f" (goals {goals[0]:.0%}, {goals[1]:.0%})" if goals else ""
            text += f"; median error {said['median']:.1%}, 90th percentile {said['p90']:.1%}{goal}"
            text += f"; bias {said['bias']:+.1%}"
        yield text


def _as_json(part: Part) -> dict[str, Any]:
    return {
        "file": str(part.file),
        "groups": part.groups,
        "rows": [
            {"id": o.row["id"], "set": o.row["set"], "tier": o.row["tier"], "metric": o.row["metric"]}
            | {"predicted": o.predicted, "measured": o.measured, "error": o.error, "right": o.right}
            for o in part.found
        ],
        "not_planned": [{"id": row["id"], "reason": reason} for row, reason in part.refused],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.csv")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--set", choices=list(GOALS), help="only this set")
    parser.add_argument("--tier", choices=["1", "2"], help="only this tier")
    args = parser.parse_args()
    try:
        parts = [compare(file, args.set, args.tier) for file in args.files or [*FITTED, HELD_OUT]]
    except (OSError, UserError) as error:
        print(error, file=sys.stderr)
        return UserError.exit_code
    if args.json:
        print(json.dumps([_as_json(part) for part in parts], indent=1))
    else:
        print("\n".join(line for part in parts for line in _lines(part)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
