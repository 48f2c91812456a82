"""The training run: module, loop, checkpoints, resuming."""
