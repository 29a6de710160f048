"""The arithmetic of stacked layers: plain PyTorch, Triton kernels, and CUDA graphs."""
