"""Triton kernels and their launchers: raw tensors in, raw tensors out. Importing from here imports triton."""
