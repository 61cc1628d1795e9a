"""Ranks are killed at random moments of loading, saving, publishing and deleting: nothing that was saved is lost."""

import random
import re
from collections import Counter
from pathlib import Path

from recipe.checkpoint.find import newest_complete, step_of
from recipe.checkpoint.verify import verify
from tests.checkpoint.light import started

KILLS = 120
SEED = 20260


def test_killed_a_hundred_times_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """Every start reads back the newest whole checkpoint, finds in it bit for bit what an undisturbed run has after
    that step (`assert_state`), on 1 to 3 ranks, and no start begins behind what an earlier one had published."""
    draw = random.Random(SEED)
    print(f"seed {SEED}")
    run_dir, log = tmp_path / "run", tmp_path / "log"
    hit: Counter[str] = Counter()
    reached = 0
    for number in range(KILLS):
        world_size = draw.choice([1, 2, 2, 2, 3])
        victims = draw.choice([[draw.randrange(world_size)], list(range(world_size))])
        with started(run_dir, world_size, 1_000_000, log, in_background=draw.random() < 0.8) as ranks:
            ranks.join(draw.uniform(0.05, draw.choice([0.4, 1.2])))
            assert [p.exitcode for p in ranks.processes] == [None] * world_size, f"start {number} ended by itself"
            ranks.kill(*victims)
            hit[ranks.phase(victims[0])] += 1
            ranks.join(draw.choice([0, 0.2]))  # the others go on for a moment, until the launcher ends them
        newest, _ = newest_complete(run_dir)
        step = 0 if newest is None else step_of(newest)
        assert step >= reached, f"start {number} lost checkpoint-{reached}; there is {newest}"
        reached = step
        if newest is not None:
            assert not [problem for _, problem in verify(newest, fast=False, processes=1) if problem]
    print(f"killed {KILLS} times, while: {dict(hit)}; checkpoint-{reached} is whole")
    assert reached > 20
    for phases in ("looking|reading|loading", "writing", "publishing", "deleting"):
        assert any(re.search(phases, phase) for phase in hit), f"no kill met a run that was {phases}: {hit}"
    with started(run_dir, 2, 4, log) as ranks:
        assert ranks.join(60) == [0, 0]
    assert not list(run_dir.glob("*.tmp")), "what the kills left was cleaned up"
    starts = log.read_text()
    assert "left by an interrupted save" in starts
