"""Many ranks: the mesh, Ulysses, the key/value gather, sharded parameters, on torch.distributed."""
