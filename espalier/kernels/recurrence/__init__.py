"""Kernels of layers with a recurrent state: short convolutions, the gated delta rule, Mamba-2."""
