"""The picture of a plan."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from recipe.plan import host, memory, speed
from recipe.plan.picture import draw
from recipe.plan.report import COLUMNS, Plan
from recipe.plan.search import best_by_size, search
from tests.plan.test_search import START


@pytest.fixture(scope="module")
def plan() -> Plan:
    told = host.estimate(START, checkpoints=1, export_bytes=2)
    return Plan(START, memory.estimate(START), speed.estimate(START), told, "adamw_torch_fused", None, None, "")


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
@pytest.mark.parametrize("searched", [False, True])
def test_it_is_drawn(name: str, searched: bool, plan: Plan, tmp_path: Path) -> None:
    draw(tmp_path / name, plan, best_by_size(search(START, 64, 2)) if searched else [])
    if name.endswith(".svg"):
        text = (tmp_path / name).read_text()
        assert text.startswith("<?xml")
    else:
        pixels = imread(tmp_path / name)[..., :3]
        colours = {tuple(np.round(pixel, 2)) for pixel in pixels[::7, ::7].reshape(-1, 3)}
        assert len(colours) > len(COLUMNS), "bars in the colours of the pieces"
