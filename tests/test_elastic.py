"""A run goes on on any number of ranks, under FSDP1 and FSDP2, as the one that was never stopped."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Launcher, write_chats, write_model

pytestmark = pytest.mark.slow
# 4 -> 2 -> 3 -> 1 -> 4 ranks, with FSDP1 and FSDP2 by turns; the last step of each.
CHAIN = ((4, "1", 2), (2, "2", 5), (3, "1", 7), (1, "2", 9), (4, "1", 12))


def test_from_4_to_2_to_3_to_1_to_4_ranks(launch: Launcher, tmp_path: Path) -> None:
    """R3, R5: the same samples in each step, whose order spans three epochs and their ends; the learning rate and the
    tokens go on; and the losses are the undisturbed run's, but for the order of sums, with dropout on: a micro-batch's
    random numbers are its own, whichever rank draws them."""
    model = write_model(tmp_path / "model", attention_dropout=0.1)
    keys: dict[str, Any] = {
        "model_name_or_path": model,
        "dataset_name": write_chats(tmp_path / "rows.jsonl", num_rows=60, seed=3),
        "packing": True,
        "global_batch_size": 12,
        "max_steps": 12,
        "save_total_limit": 1,
        "export": False,
    }
    whole = launch(tmp_path / "whole", **keys).ok()
    assert whole.metrics[-1]["epoch"] > 3, "or the order of a second epoch was not tried"
    for world_size, version, last in CHAIN:
        run = launch(
            tmp_path / "parts",
            spread=f"fsdp{version}_cpu_2rank",
            world_size=world_size,
            stop_at_step=last,
            **keys,
        ).ok()
    for exact in ("step", "batch_fingerprints", "num_tokens", "learning_rate", "epoch"):
        assert run.column(exact) == whole.column(exact), exact
    fingerprints = [one for line in whole.column("batch_fingerprints") for one in line]
    assert len(set(fingerprints)) == 12 and all(len(one) == 16 for one in fingerprints)
    assert run.column("loss") == pytest.approx(whole.column("loss"), abs=5e-6)
    assert run.column("grad_norm") == pytest.approx(whole.column("grad_norm"), rel=2e-5)


def test_changes_are_refused_by_name_and_accepted_by_name(launch: Launcher, tmp_path: Path) -> None:
    """What was accepted holds from the next step on; samples are neither lost nor repeated."""
    keys = {"spread": "fsdp2_cpu_2rank", "export": False}
    launch(tmp_path / "run", stop_at_step=2, **keys).ok()
    changed = {**keys, "global_batch_size": 4, "max_steps": 8, "learning_rate": 5e-4}
    refused = launch(tmp_path / "run", **changed)
    assert refused.code == 2
    for told in (
        "global_batch_size: 8 then, 4 now",
        "learning_rate: 0.001 then, 0.0005 now",
        "max_steps: 4 then, 8 now",
    ):
        assert told in refused.log
    way_out = "accept_changes: [global_batch_size, learning_rate, max_steps]"
    assert way_out in refused.log
    run = launch(tmp_path / "run", accept_changes="global_batch_size learning_rate max_steps", **changed).ok()
    assert "accepted: global_batch_size: 8 then, 4 now" in run.log
    # 2 steps of 8 samples and 6 of 4: 40, of which the first 39 are the first epoch.
    assert run.metrics[-1]["epoch"] == pytest.approx(40 / 39)
    assert max(run.column("learning_rate")[2:]) <= 5e-4
