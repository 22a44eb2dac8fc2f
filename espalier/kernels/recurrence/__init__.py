"""Kernels of layers that keep a state: short convolutions, the gated delta rule, Mamba-2."""
