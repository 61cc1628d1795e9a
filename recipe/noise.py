"""Silence what the libraries say at every start and a user can do nothing about, by name, each with its reason.

Importing this module does it: some of them speak while they are imported, so an entry imports it first.
"""

import logging
import warnings

# (regular expression of the message, category), each under its reason
_WARNINGS = (
    # transformers recommends Accelerate's switch over its own; preflight allows exactly one of them.
    (r"When using FSDP, prefer .*activation_checkpointing", UserWarning),
    # torch marks FSDP1 for removal; it is a strategy of this recipe as long as the pinned torch has it.
    (r"FSDP\.state_dict_type\(\) and FSDP\.set_state_dict_type\(\) are being deprecated", FutureWarning),
    (r".*FullyShardedDataParallel.*deprecated", FutureWarning),
    # Accelerate sets one thread a rank where OMP_NUM_THREADS is not set, which is right.
    (r"OMP_NUM_THREADS/MKL_NUM_THREADS unset", UserWarning),
    # torch's own FSDP1 code asks a process group for its device by a function that torch has marked for removal.
    (r"`_get_pg_default_device` will be deprecated", UserWarning),
    (r"Multiple backends are registered with this ProcessGroup", UserWarning),
    # torch's own FSDP1 state dicts are made of ShardedTensors, which torch has marked for removal.
    (r"Please use DTensor instead and we are deprecating ShardedTensor", FutureWarning),
    # On a CPU there is nothing to page to; the state is the same.
    (r"Paged optimizers are not supported on CPU", UserWarning),
    # DCP asks whether a save outside a process group was meant; it was.
    (r"torch\.distributed is disabled, unavailable or uninitialized", UserWarning),
)


for _pattern, _category in _WARNINGS:
    warnings.filterwarnings("ignore", message=_pattern, category=_category)
# bitsandbytes looks for an optional CPU kernel of 4-bit inference whenever peft imports it.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
