"""One micro-batch: the forward pass that is recorded, what is sent backward, and the checks of both."""
