# Two images, by target (BuildKit, which `docker build` uses by itself, is needed for the bind mount):
#
#   docker build -t fsdp-recipe .                     # gpu, the default; compiles flash-attn: hours on 8 cores
#   docker build -t fsdp-recipe:cpu --target cpu .    # the tests, on a machine without a GPU
#
# How they are run, also under Slurm: README, "Containers".

# PyPI's torch 2.13 is built for CUDA 13.0 and brings CUDA's libraries, cuDNN and NCCL. So the GPU image starts from
# `base`, the smallest CUDA runtime: libcudart and what lets the host's driver (580 or newer) in. flash-attn is compiled
# in the `devel` image of the same release: torch refuses to build extensions with a CUDA of another major version.
ARG CUDA_VERSION=13.0.3
ARG UBUNTU_VERSION=24.04
ARG PYTHON_TAG=3.12.12-slim-bookworm


FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu${UBUNTU_VERSION} AS flash-attn
# DL3008, here and below: Ubuntu serves only the newest build of a package, so a build that is named is soon gone. The
# release is what is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
# On PATH, because torch looks there for ninja and else compiles one file at a time.
ENV PATH=/opt/build/bin:$PATH PIP_NO_CACHE_DIR=1
# The versions are those of constraints.txt (tests/test_container.py compares them). The file itself is not copied: with
# a change of any line everything would be compiled anew.
ARG TORCH_VERSION=2.13.0
RUN python3 -m venv /opt/build \
    && pip install "torch==${TORCH_VERSION}" \
        ninja==1.13.2 packaging==26.4 psutil==7.2.2 setuptools==84.2.1 wheel==0.48.0
# post2: before it, offsets in the backward pass had 32 bits, too few where sequence x heads x head size passes 2^31.
ARG FLASH_ATTN_VERSION=2.8.3.post2
# Its setup.py reads this, not TORCH_CUDA_ARCH_LIST. 80 runs on all of Ampere and Ada, 90 on Hopper. 100 (B200) and 120
# can be added; each adds its share of time and size.
ARG FLASH_ATTN_CUDA_ARCHS="80;90"
# Files compiled at once, and GPU generations of one file at once. The largest (backward, head size 256) takes 13 GB
# with two, and there are four of it: 4 x 2 wants 8 cores and 52 GB. With less memory, lower MAX_JOBS.
ARG MAX_JOBS=4
ARG NVCC_THREADS=2
# FORCE_BUILD: setup.py would else first look for a ready wheel on GitHub, and not every torch has one.
RUN FLASH_ATTENTION_FORCE_BUILD=TRUE pip wheel --no-deps --no-build-isolation --wheel-dir /wheels \
        "flash-attn==${FLASH_ATTN_VERSION}"


FROM python:${PYTHON_TAG} AS cpu
ENV VENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
# A number that no base image has given away.
RUN useradd --create-home --uid 10001 recipe && install -d -o recipe -g recipe /app
WORKDIR /app
# A layer of its own, made anew when a version changes and not with every line of code. The index has the CPU build of
# the same torch, a tenth of the size; a local version (+cpu) wins over the plain one.
COPY constraints.txt ./
RUN python3 -m venv "$VENV" && pip install --extra-index-url https://download.pytorch.org/whl/cpu -r constraints.txt
COPY --chown=recipe . .
# All may read, whatever the modes of the checkout: Slurm's containers run as the user who started them.
RUN bash launch/env.sh && chmod -R a+rX .
USER 10001
CMD ["recipe", "--help"]


FROM nvidia/cuda:${CUDA_VERSION}-base-ubuntu${UBUNTU_VERSION} AS gpu
# ibverbs: without it NCCL goes from node to node over TCP, without a word.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ibverbs-providers libibverbs1 python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
# TORCH_DISABLE_NATIVE_JIT: torch compiles some products of matrices on their first use, which takes a C compiler,
# Python's headers and a writable home, none of which is here. https://github.com/pytorch/pytorch/issues/196977
ENV VENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 TORCH_DISABLE_NATIVE_JIT=1
RUN useradd --create-home --uid 10001 recipe && install -d -o recipe -g recipe /app
WORKDIR /app
# From here on as in `cpu`, but for flash-attn. einops is all that it needs besides torch.
COPY constraints.txt ./
RUN python3 -m venv "$VENV" && pip install -r constraints.txt
RUN --mount=type=bind,from=flash-attn,source=/wheels,target=/wheels pip install --no-deps einops==0.8.2 /wheels/*.whl
COPY --chown=recipe . .
RUN bash launch/env.sh && chmod -R a+rX .
USER 10001
CMD ["recipe", "--help"]
