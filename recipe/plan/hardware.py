"""GPUs and networks as their makers describe them. What they reach in practice is in `recipe.plan.fitted`."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from recipe.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Args:
        memory_gib: what torch sees of it (total_memory), which is less than its name says.
        tflops: dense peak of the 16-bit tensor cores (bf16, or fp16 where it has no bf16), without sparsity.
        fp32_tflops: peak of fp32 without TF32, which torch does not use by default.
        memory_gbs: bandwidth of its memory, GB/s.
        link_gbs: GB/s in one direction to the other GPUs of its node: NVLink, or PCIe.
        bf16: whether it has bf16 tensor cores, and FlashAttention-2 runs on it (Ampere and later).
        measured: whether the efficiencies were fitted on measurements of it.
        generation: key of the efficiencies in `recipe.plan.fitted`.
        devices: pattern of the names by which torch calls it.
    """

    name: str
    memory_gib: float
    tflops: float
    fp32_tflops: float
    memory_gbs: float
    link_gbs: float
    nvlink: bool
    generation: str
    devices: str
    bf16: bool = True
    measured: bool = False

    @property
    def memory(self) -> float:
        return self.memory_gib * GIB


@dataclass(frozen=True)
class Network:
    """What connects the nodes: Gb/s of a node in one direction, all its adapters together."""

    name: str
    gigabits: float

    @property
    def bytes_per_second(self) -> float:
        return self.gigabits * 1e9 / 8


# NVIDIA's data sheets; memory as `nvidia-smi` and torch report it.
_GPUS = (
    Gpu("a100-40gb", 39.4, 312, 19.5, 1555, 300, True, "ampere", r"A100.*40GB", measured=True),
    Gpu("a100-80gb", 79.15, 312, 19.5, 2039, 300, True, "ampere", r"A100(?!.*40GB)", measured=True),
    Gpu("a800-80gb", 79.15, 312, 19.5, 2039, 200, True, "ampere", r"A800", measured=True),
    Gpu("h100-pcie", 79.1, 756, 51, 2000, 32, False, "hopper", r"H100 PCIe"),
    Gpu("h100-nvl", 93.1, 835, 60, 3900, 32, False, "hopper", r"H100 NVL"),
    Gpu("h100-96gb", 95.04, 989, 67, 2400, 450, True, "hopper-500w", r"H100.*96GB", measured=True),  # HBM2e, 500 W
    Gpu("h100-80gb", 79.1, 989, 67, 3350, 450, True, "hopper", r"H100", measured=True),
    Gpu("h200", 139.8, 989, 67, 4800, 450, True, "hopper", r"H200"),
    Gpu("l40s", 44.4, 362, 91.6, 864, 32, False, "ada", r"L40S"),
    Gpu("a10g", 22.1, 70, 31.5, 600, 32, False, "ampere", r"A10G"),
    Gpu("rtx-3090", 23.69, 71, 35.6, 936, 32, False, "ampere", r"RTX 3090"),
    Gpu("rtx-4090", 23.64, 165, 82.6, 1008, 32, False, "ada", r"RTX 4090"),
    Gpu("titan-rtx", 23.65, 130.5, 16.3, 672, 16, False, "turing", r"TITAN RTX", bf16=False),
    Gpu("v100-16gb", 15.77, 125, 15.7, 900, 150, True, "volta", r"V100.*16GB", bf16=False),
    Gpu("v100-32gb", 31.74, 125, 15.7, 900, 150, True, "volta", r"V100.*32GB", bf16=False),
)
GPUS = {gpu.name: gpu for gpu in _GPUS}

# One direction, a whole node. InfiniBand and the large EFA have an adapter for each of 8 GPUs.
_NETWORKS = (
    Network("100gbe", 100),
    Network("efa-400", 400),  # p4d, p4de: 4 x 100 Gb/s
    Network("ib-200", 8 * 200),  # DGX A100: 8 x HDR
    Network("ib-400", 8 * 400),  # DGX H100: 8 x NDR
    Network("efa-3200", 3200),  # p5
)
NETWORKS = {network.name: network for network in _NETWORKS}


def gpu(name: str) -> Gpu:
    """A GPU by its name here ("a100-80gb").

    Raises:
        UserError: it is not known.
    """
    key = re.sub(r"[\s_]+", "-", name.strip().lower()).removeprefix("nvidia-")
    key = {"a10g-24gb": "a10g", "a100": "a100-80gb", "h100": "h100-80gb", "v100": "v100-32gb"}.get(key, key)
    if key not in GPUS:
        near = get_close_matches(key, GPUS, n=1, cutoff=0.0)[0]
        raise UserError(f"--gpu '{name}' is not known; the nearest is '{near}', and there are {', '.join(GPUS)}")
    return GPUS[key]


def of_device(device_name: str) -> Gpu | None:
    """A GPU by the name that torch gives a device, or None where it is not known (a CPU)."""
    return next((gpu for gpu in _GPUS if re.search(rf"\b(?:{gpu.devices})\b", device_name, re.IGNORECASE)), None)


def network(name: str) -> Network:
    """A network by its name here, or by Gb/s of a node ("1600").

    Raises:
        UserError: neither.
    """
    key = name.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", key) and float(key) > 0:
        return Network(f"{float(key):g} Gb/s", float(key))
    if key not in NETWORKS:
        near = get_close_matches(key, NETWORKS, n=1, cutoff=0.0)[0]
        names = ", ".join(f"{one.name} ({one.gigabits:g})" for one in _NETWORKS)
        raise UserError(
            f"--interconnect '{name}' is not known; the nearest is '{near}'. Give Gb/s of a node in one direction as a "
            f"number, or one of {names}"
        )
    return NETWORKS[key]
