"""Mathematics of tensors that know of no model."""
