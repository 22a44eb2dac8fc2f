"""Collectives of ranks on GPUs of one host: in memory that all ranks reach, and through NCCL."""
