"""Who holds up the others. (Real hung ranks: tests/test_disturbed.py and tests/cluster.)"""

from typing import Any

from recipe.watchdog import describe


def state(progress: int, published: int = 1, phase: str = "training step 7", node: str = "node1") -> dict[str, Any]:
    return {"node": node, "phase": phase, "progress": progress, "idle": 9.0, "published": published}


def test_a_silent_rank_holds_up_the_others_however_far_it_is() -> None:
    before = [state(9), state(9), state(9, node="node2"), state(9)]
    after = [state(9, 2), state(9, 2), state(9, node="node2"), state(9, 2)]
    first, *others = describe(before, after, 30.0).splitlines()
    assert first == (
        "no progress for 30 s (hang_timeout). Held up by rank 2 on node2, last heard of in phase 'training step 7' "
        "(silent: frozen, or its node is out of reach)"
    )
    assert len(others) == 3 and others[0] == "  rank 0 on node1, last heard of in phase 'training step 7'"


def test_a_rank_that_is_alive_and_behind() -> None:
    before = [state(9), state(8, phase="reading the batch of step 7")]
    after = [state(9, 2), state(8, 2, phase="reading the batch of step 7")]
    text = describe(before, after, 30.0)
    assert "Held up by rank 1 on node1, last heard of in phase 'reading the batch of step 7' (alive and furth" in text


def test_ranks_that_are_all_as_far() -> None:
    text = describe([state(9), state(9)], [state(9, 2), state(9, 2)], 30.0)
    assert "rank 0 on node1" in text and "rank 1 on node1" in text and "a step slower than hang_timeout" in text


def test_a_rank_that_never_said_a_word() -> None:
    assert "Held up by rank 1, of which nothing was ever heard" in describe([state(1), None], [state(1, 2), None], 30.0)


def test_a_long_list_is_cut() -> None:
    ranks = [state(9) for _ in range(64)]
    again = [state(9, 2) for _ in range(63)]
    assert len(describe(ranks, [*again, ranks[63]], 30.0).splitlines()) == 17
