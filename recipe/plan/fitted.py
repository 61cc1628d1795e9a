"""The constants that no data sheet gives: what software and hardware reach in practice.

All of them, in one place. What each was fitted on, and the error that is left, is in README.md ("How it plans");
`python benchmarks/plan_accuracy.py` says the errors anew. None is for one source or one model.
"""

GIB = 2**30

# -- memory ------------------------------------------------------------------------------------------------------------

# Memory that PyTorch's allocator reserves and cannot use, as a share of what comes and goes (activations, logits,
# gathered weights); and where layers are recomputed in between, without expandable segments.
FRAGMENTATION, FRAGMENTATION_RECOMPUTED = 0.09, 0.20
# It rounds blocks to 2 MiB (c10/cuda/CUDACachingAllocator.cpp), so that a tensor wastes one on the average.
ROUNDING_BYTES = 2**20
# Outside of PyTorch's allocator: the CUDA context with its kernels, and NCCL's buffers where there are several GPUs
# (together 0.87 GiB in the OOM text of Hugging Face's FSDP post: 23.65 GiB in all, 22.76 reserved, 0.02 free).
CONTEXT_BYTES = 0.52 * GIB
NCCL_BYTES = 0.35 * GIB
# FSDP1 marks its buffers as used by other streams (`record_stream`), and the host runs ahead: so many units' gradients
# wait for the GPU at the end of the backward pass (llama-recipes issue 120: 59 GiB active, 42 allocated).
FSDP1_WAITING_UNITS = 2.0
# A plan that needs more than this share of the card is tight: what is predicted is off by as much.
COMFORTABLE = 0.94

# -- time --------------------------------------------------------------------------------------------------------------

# Share of a GPU's peak that large matrix products reach in a long run, and causal FlashAttention-2 (of the half of the
# scores that count), by generation. "hopper-500w" is an H100 held at 500 W. Fitted: ampere (A100), hopper (H100),
# hopper-500w. Not fitted: volta, turing, ada.
MATMUL = {"volta": 0.65, "turing": 0.55, "ampere": 0.80, "ada": 0.70, "hopper": 0.66, "hopper-500w": 0.50}
ATTENTION = {"volta": 0.30, "turing": 0.35, "ampere": 0.57, "ada": 0.45, "hopper": 0.31, "hopper-500w": 0.37}
TRITON = 0.61  # of that, for the first Triton flash attention
# Traffic in GPU memory of all but matrix products and attention (norms, activations, residuals, rotations, casts) in a
# forward pass, as a multiple of what a layer keeps when nothing is recomputed; backward twice as much. Share of the
# memory's bandwidth that they and the optimizer reach (0.80, a convention: only their quotient is fitted).
TRAFFIC, BANDWIDTH = 3.3, 0.80
# Bytes that the loss moves for each logit, forward and backward.
LOSS_TRAFFIC = 31.0
# Share of a link's bandwidth that collectives reach: NVLink, between nodes; PCIe, not fitted. Seconds that a collective
# takes however small it is (not fitted), and for every node in its ring.
NVLINK, NETWORK, PCIE = 0.60, 0.765, 0.45
LATENCY, LATENCY_PER_NODE = 40e-6, 36e-6
# By how much compute is slowed down, as a share of the time in which a collective runs beside it.
CONTENTION = 0.20
# Not fitted: kernels of a layer's forward pass and seconds of the host for each; bytes a second of an optimizer step in
# host memory (a rank), and of a copy between host and GPU.
KERNELS, LAUNCH = 35, 6e-6
HOST_BANDWIDTH, PCIE_BANDWIDTH = 10e9, 12e9

# -- host --------------------------------------------------------------------------------------------------------------

# A rank's own resident memory before it holds anything: Python, the libraries, the data. Measured in runs on two CPU
# ranks, from `import recipe.train` (0.48) until the model is wrapped (0.49; 0.54 on the rank that prepares the
# quickstart's data), with PyTorch's CPU build; 0.14 of it are the libraries' files, which the ranks of a node share.
# With CUDA's libraries it is more, which was not measured.
PROCESS_BYTES = 0.5 * GIB
# What glibc's heap holds in vain on a CPU rank, at most, by phase and by FSDP's version: it gives blocks of less than
# 32 MB back from its end alone, and what comes next does not fill the gaps. FSDP2 makes tensors whole, not units, and
# has more blocks that small. Fitted on models of 58, 235 and 268 M parameters in fp32 on two ranks: in training 0.10 to
# 0.28 GiB under FSDP1, 0.34 to 0.81 under FSDP2.
HEAP_BYTES = {
    "load": {1: 0.0, 2: 0.06 * GIB},
    "train": {1: 0.2 * GIB, 2: 0.5 * GIB},
    "export": {1: 0.2 * GIB, 2: 0.15 * GIB},
}
