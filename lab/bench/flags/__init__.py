"""The flags of the laboratory's benches, a module for each command, and what they share.  None imports PyTorch."""
