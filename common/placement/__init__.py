"""Places on GPUs: which one a process takes, before it touches CUDA. No torch."""
