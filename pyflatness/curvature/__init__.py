"""Ask questions about curvature that are not one number a layer: what changes of the weights cost."""
