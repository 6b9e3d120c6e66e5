"""One step: forward, backward, and gradients as flat arrays."""
