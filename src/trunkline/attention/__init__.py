"""The core: attention of one layer over all its chunks, on kernels that PyTorch ships."""
