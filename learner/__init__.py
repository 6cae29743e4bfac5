"""The learner: advantages, losses, packing, the DeepSpeed engine, checkpoints and the publication of weights."""
