"""Ranks fail together and agree."""

import torch.distributed as dist

from recipe import ranks
from recipe.errors import UserError
from tests.distributed.ranks import run_ranks


def fail_on(rank: int, kind: type[Exception]) -> str:
    try:
        with ranks.all_or_none("counting"):
            if dist.get_rank() == rank:
                raise kind("no more numbers")
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "passed"


def test_one_rank_failing_fails_all_with_its_name() -> None:
    said = run_ranks(fail_on, 1, OSError)
    assert said == ["RuntimeError: counting failed on 1 of 2 ranks: rank 1: OSError: no more numbers"] * 2


def test_a_users_mistake_stays_one() -> None:
    assert run_ranks(fail_on, 1, UserError) == ["UserError: no more numbers"] * 2


def test_nobody_failing_passes() -> None:
    assert run_ranks(fail_on, 7, OSError) == ["passed"] * 2


def learn() -> str:
    return ranks.from_main("said by 0" if dist.get_rank() == 0 else None)


def test_from_main() -> None:
    assert run_ranks(learn) == ["said by 0"] * 2
