"""What the families share.  Weights are plain tensors: a call costs its torch operations and little else."""
