"""Everything that names FSDP1, FSDP2 or Accelerate's plugin. No other room does.

- `plugin`: what the accelerate file asked for, and the door to real FSDP on CPU ranks
- `wrap`: shard a model that is on meta, streaming its weights in
- `gather`: whole parameters again, one FSDP unit at a time
- `state`: sharded state dicts of model and optimizer, for `torch.distributed.checkpoint`
- `claims`: what the run asked for, asserted on what it got
"""
