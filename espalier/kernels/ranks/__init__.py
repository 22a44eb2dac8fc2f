"""How ranks on GPUs of one host join their results: in memory that all of them reach, and through NCCL."""
