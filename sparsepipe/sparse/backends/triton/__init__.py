"""Triton kernels of sparse convolution and pooling, for 16 bits and TF32 on GPUs from sm 8.0 on."""
