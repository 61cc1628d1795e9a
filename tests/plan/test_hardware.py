import pytest

from recipe.errors import UserError
from recipe.plan import fitted
from recipe.plan.hardware import GPUS, NETWORKS, gpu, network, of_device


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A800-SXM4-80GB", "a800-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
        ("TITAN RTX", "titan-rtx"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA RTX A1000", None),
        ("Tesla T4", None),
        ("cpu", None),
    ],
)
def test_a_gpu_by_the_name_that_torch_gives_it(device, name):
    assert of_device(device) == (GPUS[name] if name else None)


@pytest.mark.parametrize(
    ("name", "key"),
    [("a100-80gb", "a100-80gb"), ("A100 80GB", "a100-80gb"), ("a100", "a100-80gb"), ("V100", "v100-32gb")]
    + [("H100", "h100-80gb"), (" rtx_4090 ", "rtx-4090"), ("Titan RTX", "titan-rtx"), ("a10g-24gb", "a10g")],
)
def test_a_gpu_by_its_name_here(name, key):
    assert gpu(name).name == key


def test_an_unknown_gpu_is_told_its_nearest_and_all():
    with pytest.raises(UserError, match="--gpu 'a100-60gb' is not known; the nearest is 'a100-[48]0gb'") as caught:
        gpu("a100-60gb")
    assert all(name in str(caught.value) for name in GPUS)


@pytest.mark.parametrize("card", GPUS.values(), ids=GPUS)
def test_every_gpu_is_whole(card):
    """torch sees less than a card's name says, and every generation has its efficiencies."""
    assert min(card.tflops, card.fp32_tflops, card.memory_gbs, card.link_gbs) > 0
    assert card.tflops > card.fp32_tflops and card.generation in fitted.MATMUL and card.generation in fitted.ATTENTION
    sized = [int(part[:-2]) for part in card.name.split("-") if part.endswith("gb")]
    assert all(0.97 * size < card.memory_gib < size for size in sized)
    assert card.nvlink == (card.link_gbs > 100)


@pytest.mark.parametrize(
    ("name", "gigabits"),
    [("ib-400", 3200), ("IB-200", 1600), ("efa-400", 400), ("100gbe", 100), ("1600", 1600), ("12.5", 12.5)],
)
def test_a_network_by_name_or_by_its_gigabits(name, gigabits):
    assert network(name).gigabits == gigabits
    assert network(name).bytes_per_second == gigabits * 125e6


@pytest.mark.parametrize("name", ["ib-300", "0", "-5", "1e3", "", "nan"])
def test_an_unknown_network_is_told_its_nearest_and_all(name):
    with pytest.raises(UserError, match=f"--interconnect '{name}' is not known; the nearest is '") as caught:
        network(name)
    assert "Give Gb/s of a node in one direction" in str(caught.value)
    assert all(f"{one.name} ({one.gigabits:g})" in str(caught.value) for one in NETWORKS.values())
