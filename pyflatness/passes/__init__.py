"""Run one micro-batch: the recorded forward pass, what is sent backward, and the checks of both."""
