"""Collective operations between ranks on GPUs of one host: in memory that all ranks can read and write, and through
NCCL."""
