"""The CUDA decoder: kernels, captured forwards and draft chains. Most modules need Triton; importing this does not."""
