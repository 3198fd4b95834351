"""Score many models: what specs name, and the weights in checkpoints."""
