"""The flags of `espalier bench`, a module for each command, and what they share.  None imports PyTorch."""
