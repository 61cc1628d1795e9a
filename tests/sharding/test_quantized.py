"""8-bit moments through fp32 and back."""

import pytest
import torch
from bitsandbytes.functional import create_dynamic_map

from recipe.sharding.quantized import BLOCK_SIZE, _dense, _store


@pytest.mark.parametrize("suffix", ("1", "2"))
@pytest.mark.parametrize("size", (4096, 4096 + 7))
def test_moments_come_back_as_the_same_codes_and_scales(suffix: str, size: int) -> None:
    """R9: every code in every place, blocks whose largest magnitude is negative, and blocks of zeros."""
    table = torch.as_tensor(create_dynamic_map(signed=suffix == "1"))
    draw = torch.Generator().manual_seed(0)
    blocks = -(-size // BLOCK_SIZE)
    codes = torch.randint(0, 256, (size,), generator=draw, dtype=torch.uint8)
    codes[::BLOCK_SIZE] = (
        255 if suffix == "2" else 0
    )  # each block has an element of the largest magnitude, here negative
    codes[1 :: 2 * BLOCK_SIZE] = 255  # and here positive too
    scales = torch.rand(blocks, generator=draw) * 10.0 ** torch.arange(blocks).remainder(9).neg()
    scales[3], codes[3 * BLOCK_SIZE : 4 * BLOCK_SIZE] = 0.0, int(table.abs().argmin())
    state = {f"state{suffix}": codes, f"absmax{suffix}": scales, f"qmap{suffix}": table}
    restored = {
        f"state{suffix}": torch.zeros_like(codes),
        f"absmax{suffix}": torch.ones(blocks),
        f"qmap{suffix}": table,
    }
    _store(restored, suffix, _dense(state, suffix))
    assert torch.equal(restored[f"absmax{suffix}"], scales)
    assert torch.equal(restored[f"state{suffix}"], codes)


def test_values_are_what_the_codes_stand_for() -> None:
    table = torch.as_tensor(create_dynamic_map(signed=True))
    codes = torch.arange(256, dtype=torch.uint8)
    dense = _dense({"state1": codes, "absmax1": torch.tensor([0.5]), "qmap1": table}, "1")
    assert torch.allclose(dense, table * 0.5)
