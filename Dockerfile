# GPU:  docker build -t fsdp-recipe .
#       docker run --rm --gpus all --ipc=host -v "$PWD/runs:/app/runs" fsdp-recipe bash launch/train.sh CONFIG
# CPU:  docker build -t fsdp-recipe:cpu --build-arg DEVICE=cpu .
#       docker run --rm fsdp-recipe:cpu bash launch/test.sh
# --ipc=host: NCCL and data loader workers talk through shared memory, of which a container has 64 MB.

ARG DEVICE=gpu
# PyTorch's own packages bring CUDA 13.0, cuDNN and NCCL; of the image only its hooks to the host's driver are used.
ARG CUDA_TAG=13.0.3-base-ubuntu24.04
ARG PYTHON_TAG=3.12-slim-bookworm

FROM nvidia/cuda:${CUDA_TAG} AS base-gpu
# ibverbs: without it NCCL goes from node to node over TCP, without a word.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv libibverbs1 ibverbs-providers \
    && rm -rf /var/lib/apt/lists/*

FROM python:${PYTHON_TAG} AS base-cpu
# Has the CPU build of the same torch, which is 10 times smaller; a local version (+cpu) wins over the plain one.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

FROM base-${DEVICE}
ENV VENV=/opt/venv PIP_NO_CACHE_DIR=1
RUN useradd --create-home recipe && install -d -o recipe -g recipe /app /opt/venv
USER recipe
WORKDIR /app
# A layer of its own, made anew only when a version changes, not with every line of code.
COPY --chown=recipe constraints.txt ./
RUN python3 -m venv "$VENV" && "$VENV/bin/python" -m pip install -r constraints.txt
COPY --chown=recipe . .
RUN bash -c 'source launch/env.sh'
ENV PATH=/opt/venv/bin:$PATH
CMD ["recipe", "--help"]
